"""Acceptance by place: counts by hand, and what is guessed where nothing is known."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphengine.draft_length.acceptance import FIRST_GUESS, Acceptance, expected_tokens


def test_counts_are_conditional() -> None:
    """A place that was not reached is no rejection."""
    known = Acceptance(3, window=1 << 40)  # nothing fades
    for drafts, accepted in [(3, 1), (3, 3), (1, 1), (2, 0), (0, 0)]:
        known.observe(drafts, accepted)
    assert known.judged == pytest.approx([4, 2, 1])
    assert known.accepted == pytest.approx([3, 1, 1])
    assert known.rates([0, 0, 0], weight=0.0) == pytest.approx([3 / 4, 1 / 2, 1])


def test_the_unknown_is_guessed_from_the_place_before() -> None:
    known = Acceptance(3, window=100)
    assert known.rates(None, weight=2.0) == pytest.approx([FIRST_GUESS] * 3)
    for _ in range(2000):
        known.observe(1, 1)
    assert known.rates(None, weight=2.0) == pytest.approx([1] * 3, abs=0.02)
    assert known.rates([0.5] * 3, weight=10.0)[2] == pytest.approx(0.5)


def test_old_observations_fade_at_every_place() -> None:
    """Evidence against long drafts that outlives the phase it was from."""
    known = Acceptance(2, window=20)
    for _ in range(200):
        known.observe(2, 1)
    assert known.rates(None, weight=2.0)[1] < 0.1
    for _ in range(200):
        known.observe(1, 1)
    assert known.rates(None, weight=2.0)[1] > 0.95


@given(st.lists(st.floats(0, 1), max_size=8))
def test_expected_tokens_are_the_sum_over_what_may_happen(rates: list[float]) -> None:
    """Against the definition: each number of accepted drafts, by its probability."""
    found = expected_tokens(rates)
    assert found[0] == 1
    assert all(a <= b + 1e-12 for a, b in pairwise(found))
    for length in range(len(rates) + 1):
        total, chance = 0.0, 1.0
        for place, rate in enumerate(rates[:length]):
            total += chance * (1 - rate) * (place + 1)
            chance *= rate
        total += chance * (length + 1)
        assert found[length] == pytest.approx(total)


def test_more_accepted_than_drafted_is_a_fault() -> None:
    with pytest.raises(AssertionError, match="3 of 2 drafts"):
        Acceptance(4, window=8).observe(2, 3)
