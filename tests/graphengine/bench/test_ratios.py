"""Medians of paired ratios and their intervals, on numbers whose answer is known."""

import numpy as np
import pytest

from graphengine.bench.ratios import median_interval


def test_equal_ratios_have_no_spread() -> None:
    """Guards against an interval that is wide (or narrow) whatever the data."""
    found = median_interval([1.5] * 8)
    assert (found.median, found.low, found.high, found.num_values) == (1.5, 1.5, 1.5, 8)


def test_one_value_claims_nothing() -> None:
    """Guards against a crash, or an invented spread, where there is one pair only."""
    found = median_interval([0.9])
    assert (found.median, found.low, found.high, found.coverage) == (0.9, 0.9, 0.9, 0.0)
    assert found.bounds == "one value"


def test_median_resists_an_outlier() -> None:
    """Guards against means under the name of a median: one stalled run must not decide."""
    assert median_interval([1.0, 1.1, 1.2, 1.3, 90.0]).median == 1.2


@pytest.mark.parametrize(
    ("count", "low", "high", "coverage"),
    [
        # Ranks and coverages of the published tables of the sign test's interval.
        (2, 1, 2, 0.5),
        (5, 1, 5, 0.9375),
        (6, 1, 6, 0.96875),
        (8, 1, 8, 0.9921875),
        (9, 2, 8, 0.9609375),
        (10, 2, 9, 0.978515625),
        (12, 3, 10, 0.961426),
        (20, 6, 15, 0.958611),
        (30, 10, 21, 0.957226),
        (100, 40, 61, 0.964800),
    ],
)
def test_ranks_are_those_of_the_sign_test(count: int, low: int, high: int, coverage: float) -> None:
    """Guards against bounds one rank too far in, which claim a confidence that they do not have."""
    values = list(range(1, count + 1))
    found = median_interval(list(np.random.default_rng(0).permutation(values).astype(float)))
    assert (found.low, found.high) == (low, high)
    assert found.coverage == pytest.approx(coverage, abs=1e-6)
    assert ("%" in found.bounds) == (count < 6)


def test_interval_covers_the_true_median_at_least_95_percent_of_the_time() -> None:
    """Guards against wrong tails: coverage is what the interval claims, skewed data included."""
    generator = np.random.default_rng(7)
    intervals = [median_interval(list(generator.lognormal(0.0, 0.7, size=12))) for _ in range(2000)]
    covered = np.mean([one.low <= 1.0 <= one.high for one in intervals])
    assert covered == pytest.approx(intervals[0].coverage, abs=0.015)
    above = np.mean([one.low > 1.0 for one in intervals])
    assert above == pytest.approx((1 - intervals[0].coverage) / 2, abs=0.01)


def test_interval_narrows_with_more_pairs() -> None:
    """Guards against an interval that does not use all values."""
    values = list(np.random.default_rng(1).normal(1.0, 0.2, size=200))
    few, many = median_interval(values[:20]), median_interval(values)
    assert many.high - many.low < few.high - few.low


def test_figures_that_are_not_finite_are_refused() -> None:
    """Guards against a NaN or a division by zero that silently becomes the median."""
    with pytest.raises(AssertionError, match="not finite"):
        median_interval([1.0, float("inf")])
