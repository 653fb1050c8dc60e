"""Tests of counts, on numbers whose answer is known and on samples whose law is."""

from math import erfc, exp, sqrt

import numpy as np
import pytest

from graphengine.bench.distributions import chi_square_p, holm, total_variation, two_sample_p


def test_fit_has_the_chi_square_law_s_values() -> None:
    """Guards a wrong statistic, wrong degrees of freedom or the wrong tail."""
    assert chi_square_p([60, 40], [0.5, 0.5]) == pytest.approx(erfc(sqrt(4 / 2)))
    assert chi_square_p([10, 20, 30], [1, 1, 1]) == pytest.approx(exp(-10 / 2))
    assert chi_square_p([20, 20, 20], [2, 2, 2]) == 1.0


def test_homogeneity_has_the_chi_square_law_s_values() -> None:
    """Guards a test that takes one sample's counts for the law, or counts twice the freedom."""
    assert two_sample_p([10, 20], [20, 10]) == pytest.approx(erfc(sqrt(20 / 3 / 2)))
    # R: chisq.test(rbind(c(10, 20, 30), c(20, 40, 60))) and with c(30, 20, 10)
    assert two_sample_p([10, 20, 30], [20, 40, 60]) == pytest.approx(1.0)
    assert two_sample_p([10, 20, 30], [30, 20, 10]) == pytest.approx(exp(-20 / 2))


def test_rare_categories_are_pooled() -> None:
    """Guards a single rare token that alone decides the test."""
    assert chi_square_p([50, 48, 1, 1], [0.5, 0.4998, 1e-4, 1e-4]) > 0.5
    assert two_sample_p([50, 49, 1, 0], [50, 49, 0, 1]) == pytest.approx(1.0)
    # The pool of many rare ones still counts: all of them came in one sample.
    rare = [2] * 20
    assert two_sample_p([60, *rare, *[0] * 20], [100, *[0] * 40]) < 1e-6


def test_what_cannot_come_and_came() -> None:
    """Guards a token without probability that vanishes in the pool."""
    assert chi_square_p([99, 1], [1.0, 0.0]) == 0.0
    assert chi_square_p([100, 0], [1.0, 0.0]) == chi_square_p([3, 0], [1.0, 0.0]) == 1.0
    assert two_sample_p([100, 0], [90, 0]) == 1.0
    assert two_sample_p([60, 40, 0], [40, 60, 0], least=0) == two_sample_p([60, 40], [40, 60])


def test_one_category_says_nothing() -> None:
    """Guards a NaN, which is neither above nor below any level."""
    assert two_sample_p([7], [9]) == two_sample_p([2, 1], [1, 2]) == 1.0


def test_p_values_of_equal_laws_are_spread_evenly() -> None:
    """Guards a test that cries wolf, or never does, at sizes as `check-lossless` has them."""
    draw = np.random.default_rng(3)
    probs = draw.dirichlet([0.3] * 12)
    values = [
        two_sample_p(draw.multinomial(200, probs), draw.multinomial(200, probs))
        for _ in range(2000)
    ]
    assert np.mean(np.array(values) < 0.05) == pytest.approx(0.05, abs=0.02)
    assert np.mean(np.array(values) < 0.5) == pytest.approx(0.5, abs=0.05)


def test_unequal_laws_are_told_apart() -> None:
    """Guards a test without power."""
    draw = np.random.default_rng(4)
    first, second = draw.multinomial(400, [0.5, 0.3, 0.2]), draw.multinomial(400, [0.3, 0.3, 0.4])
    assert two_sample_p(first, second) < 1e-4
    assert chi_square_p(second, [0.5, 0.3, 0.2]) < 1e-6


def test_total_variation() -> None:
    """Guards counts compared without regard to the sizes of their samples."""
    assert total_variation([10, 30], [1, 3]) == 0.0
    assert total_variation([5, 0], [0, 9]) == 1.0
    assert total_variation([0.5, 0.5], [1, 3]) == pytest.approx(0.25)


def test_holm_is_the_published_adjustment() -> None:
    """Guards Bonferroni under Holm's name, and a result in sorted order."""
    # R: p.adjust(c(0.01, 0.04, 0.03, 0.005), "holm")
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.7, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
