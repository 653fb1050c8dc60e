"""The statistics that distribution tests share."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def chi_square_p(counts: npt.NDArray[Any], probs: npt.NDArray[Any], least: float = 5.0) -> float:
    """p-value of Pearson's test that `counts` [n] were drawn by `probs` [n].

    Tokens whose expected count is below `least` are pooled; one without probability that came all
    the same makes it 0.
    """
    expected = probs / probs.sum() * counts.sum()
    if counts[expected == 0].any():
        return 0.0
    rare = expected < least
    seen = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    halves = torch.tensor([(len(seen) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*halves))
