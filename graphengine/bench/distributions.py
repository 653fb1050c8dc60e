"""Statistics of counts: whether tokens were drawn by given probabilities, or two samples alike.

Owns the tests that claims of equal distribution are made with. Knows nothing of where counts come
from. Every p-value is of Pearson's chi-square test, whose upper tail is the regularised incomplete
gamma function; `holm` turns several into one claim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float64]


def chi_square_p(counts: npt.ArrayLike, probs: npt.ArrayLike, least: float = 5.0) -> float:
    """p-value of Pearson's test of fit: that `counts` [n] were drawn by `probs` [n].

    Categories whose expected count is below `least` are pooled, with the rarest of the others if
    they do not come to `least` together: below that the chi-square law is no approximation.

    Args:
        counts: of each category, at least one in all.
        probs: up to a common factor. A category without probability that came all the same makes
            the answer 0.
    """
    seen, wanted = _counts(counts), np.asarray(probs, dtype=np.float64)
    expected = wanted / wanted.sum() * seen.sum()
    if seen[expected == 0].any():
        return 0.0
    pool = _rare(expected, least)
    seen, expected = _pooled(seen, pool), _pooled(expected, pool)
    seen, expected = seen[expected > 0], expected[expected > 0]
    return _upper_tail(((seen - expected) ** 2 / expected).sum(), len(seen) - 1)


def two_sample_p(first: npt.ArrayLike, second: npt.ArrayLike, least: float = 5.0) -> float:
    """p-value of Pearson's test of homogeneity: that two samples were drawn by the same law.

    A 2 x n table of counts, whose expected ones are what both samples together give each. Pooled
    as in `chi_square_p`, by the expected count in the smaller sample.

    Args:
        first, second: counts [n] of the same categories, at least one in each sample.
    """
    table = np.stack([_counts(first), _counts(second)])
    sizes = table.sum(axis=1)
    expected = np.outer(sizes, table.sum(axis=0)) / table.sum()
    pool = _rare(expected.min(axis=0), least)
    seen = np.stack([_pooled(row, pool) for row in table])
    mean = np.stack([_pooled(row, pool) for row in expected])
    seen, mean = seen[:, mean[0] > 0], mean[:, mean[0] > 0]
    return _upper_tail(((seen - mean) ** 2 / mean).sum(), seen.shape[1] - 1)


def total_variation(first: npt.ArrayLike, second: npt.ArrayLike) -> float:
    """Half the sum of differences of two laws, 0 to 1: how much of one lies elsewhere in the other.

    Of raw counts it is above 0 for samples of the same law, too.

    Args:
        first, second: counts or probabilities [n] of the same categories, up to a factor each.
    """
    left, right = _counts(first), _counts(second)
    return float(np.abs(left / left.sum() - right / right.sum()).sum() / 2)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for their number, in the same order (Holm 1979).

    The chance that any of the true hypotheses has an adjusted value of at most `a` is at most `a`,
    however the tests depend on each other.
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def _counts(values: npt.ArrayLike) -> Floats:
    found = np.asarray(values, dtype=np.float64)
    assert found.sum() > 0, "nothing was counted"
    return found


def _rare(expected: Floats, least: float) -> npt.NDArray[np.bool_]:
    """Which categories [n] go into one."""
    rare: npt.NDArray[np.bool_] = expected < least
    if rare.any() and not rare.all() and expected[rare].sum() < least:
        rare[np.where(rare, np.inf, expected).argmin()] = True
    return rare


def _pooled(values: Floats, pool: npt.NDArray[np.bool_]) -> Floats:
    kept = values[~pool]
    return np.append(kept, values[pool].sum()) if pool.any() else kept


def _upper_tail(statistic: Any, freedom: int) -> float:
    """P(X >= statistic) of the chi-square law with so many degrees of freedom."""
    if freedom < 1:
        return 1.0  # one category: nothing to tell apart
    halves = torch.tensor([freedom / 2, float(statistic) / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*halves))
