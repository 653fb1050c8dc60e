"""Statistics of paired measurements: the median of the paired ratios and its bootstrap interval.

Owns the two figures that every claim of speed is made with. Knows nothing of what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A median and its 95 % percentile-bootstrap interval over `num_values` values."""

    median: float
    low: float
    high: float
    num_values: int


def median_interval(values: Sequence[float], *, seed: int = 0) -> Interval:
    """Median with its interval; both bounds are the value itself where there is only one.

    Args:
        values: one figure a pair, at least one, all finite.
        seed: of the resampling, so that a report can be computed again.
    """
    data = np.asarray(values, dtype=np.float64)
    assert data.size > 0, "no value to take the median of"
    assert np.isfinite(data).all(), f"a figure is not finite: {values}"
    generator = np.random.default_rng(seed)
    picks = generator.integers(0, data.size, size=(RESAMPLES, data.size))
    low, high = np.percentile(np.median(data[picks], axis=1), [2.5, 97.5])
    return Interval(
        median=float(np.median(data)), low=float(low), high=float(high), num_values=data.size
    )
