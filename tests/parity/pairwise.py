"""Pairwise combinations: few rows in which every pair of values of any two factors occurs."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

Pair = tuple[str, Any, str, Any]


def pairwise(factors: Mapping[str, Sequence[Any]], *, seed: int = 0) -> list[dict[str, Any]]:
    """Rows that cover all pairs, greedily: each row is the best of some random candidates."""
    draw = random.Random(seed)
    names = list(factors)
    missing: set[Pair] = {
        (first, a, second, b)
        for first, second in combinations(names, 2)
        for a in factors[first]
        for b in factors[second]
    }
    rows = []
    while missing:
        first, a, second, b = min(missing, key=repr)  # whatever the hash seed
        candidates = []
        for _ in range(40):
            row = {name: draw.choice(list(values)) for name, values in factors.items()}
            row[first], row[second] = a, b
            candidates.append(row)
        best = max(candidates, key=lambda row: len(missing & pairs_of(row)))
        rows.append(best)
        missing -= pairs_of(best)
    return rows


def pairs_of(row: Mapping[str, Any]) -> set[Pair]:
    """The pairs that a row covers."""
    return {(first, row[first], second, row[second]) for first, second in combinations(row, 2)}
