"""Statistics of paired measurements: the median of the paired ratios and its interval.

Owns the figures that every claim of speed is made with. Knows nothing of what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, inf, isfinite
from statistics import median

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A median and two of its values that enclose the true one with probability `coverage`."""

    median: float
    low: float
    high: float
    coverage: float  # at least 0.95, except where there are fewer than six values
    num_values: int

    @property
    def half_width(self) -> float:
        """The farther bound from the median, as a share of it; infinite below the coverage."""
        if self.coverage < CONFIDENCE:
            return inf
        return max(self.high - self.median, self.median - self.low) / self.median

    @property
    def bounds(self) -> str:
        """Both bounds as text, with the coverage where it is below 95 %."""
        if self.num_values == 1:
            return "one value"
        text = f"{self.low:.2f} to {self.high:.2f}"
        return text if self.coverage >= CONFIDENCE else f"{text} ({self.coverage:.0%})"


def median_interval(values: Sequence[float]) -> Interval:
    """Median with its sign-test interval: two order statistics, exact for any distribution.

    The interval reaches from the j-th smallest to the j-th largest value, for the largest j that
    misses the true median at most one time in twenty: each end by itself is a 97.5 % bound. Fewer
    than six values cannot do that; they give their whole range, and `coverage` says what it is
    worth. (Conover, Practical Nonparametric Statistics, section 3.2.)

    Args:
        values: independent figures, at least one, all finite.
    """
    assert len(values) > 0, "no value to take the median of"
    assert all(map(isfinite, values)), f"a figure is not finite: {values}"
    ordered, count = sorted(values), len(values)
    rank, missed = 1, 2 / 2**count  # missed: both tails of Binomial(count, 1/2) below rank
    while True:
        more = missed + 2 * comb(count, rank) / 2**count
        if more > 1 - CONFIDENCE:
            break
        rank, missed = rank + 1, more
    return Interval(
        median=median(ordered),
        low=ordered[rank - 1],
        high=ordered[count - rank],
        coverage=1 - missed,
        num_values=count,
    )
