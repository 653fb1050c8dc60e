"""Medians of paired ratios and their bootstrap intervals, on numbers whose answer is known."""

import numpy as np
import pytest

from graphengine.bench.ratios import median_interval


def test_equal_ratios_have_no_spread() -> None:
    """Guards against an interval that is wide (or narrow) whatever the data."""
    found = median_interval([1.5] * 8)
    assert (found.median, found.low, found.high, found.num_values) == (1.5, 1.5, 1.5, 8)


def test_one_value_is_its_own_interval() -> None:
    """Guards against a crash, or an invented spread, where there is one pair only."""
    found = median_interval([0.9])
    assert (found.median, found.low, found.high) == (0.9, 0.9, 0.9)


def test_median_resists_an_outlier() -> None:
    """Guards against means under the name of a median: one stalled run must not decide."""
    assert median_interval([1.0, 1.1, 1.2, 1.3, 90.0]).median == 1.2


def test_interval_covers_the_true_median_95_percent_of_the_time() -> None:
    """Guards against wrong percentiles: coverage is what the interval claims."""
    generator = np.random.default_rng(7)
    covered = 0
    for trial in range(200):
        found = median_interval(list(generator.normal(1.0, 0.2, size=25)), seed=trial)
        covered += found.low <= 1.0 <= found.high
    assert 0.90 <= covered / 200 <= 0.99


def test_interval_narrows_with_more_pairs_and_is_repeatable() -> None:
    """Guards against resampling fewer values than there are, and against reports that vary."""
    values = list(np.random.default_rng(1).normal(1.0, 0.2, size=200))
    few, many = median_interval(values[:20]), median_interval(values)
    assert many.high - many.low < few.high - few.low
    assert median_interval(values) == many


def test_figures_that_are_not_finite_are_refused() -> None:
    """Guards against a NaN or a division by zero that silently becomes the median."""
    with pytest.raises(AssertionError, match="not finite"):
        median_interval([1.0, float("inf")])
