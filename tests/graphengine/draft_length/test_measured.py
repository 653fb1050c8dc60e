"""The measured draft length against every fixed one, in simulated decode loops."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphengine.draft_length.measured import MeasuredLength
from graphengine.draft_length.policy import Batch, FixedLength
from tests.graphengine.draft_length.simulation import LENGTHS, Load, Table

NUM_REQS = [1, 4, 16]


def measured(load: Load) -> MeasuredLength:
    return MeasuredLength(Table(load.has_model), LENGTHS, listens=not load.has_model)


def fixed_speeds(load: Load) -> dict[int, float]:
    return {k: load.run(FixedLength(k)).speed for k in LENGTHS}


@pytest.mark.parametrize("has_model", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("num_reqs", NUM_REQS)
def test_bad_drafts_cost_next_to_nothing(num_reqs: int, rate: float, has_model: bool) -> None:
    """A loss against off where drafts do not pay, the first steps and all probes included."""
    load = Load(num_reqs, lambda index, at: rate, has_model, num_tokens=1500)
    assert load.run(measured(load)).speed > 0.98 * load.run(FixedLength(0)).speed


@pytest.mark.parametrize("has_model", [False, True])
@pytest.mark.parametrize("rate", [0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("num_reqs", NUM_REQS)
def test_it_is_about_as_fast_as_the_best_fixed_length(
    num_reqs: int, rate: float, has_model: bool
) -> None:
    """A length that is too careful, or stuck at the first one that was good enough."""
    load = Load(num_reqs, lambda index, at: rate, has_model, num_tokens=1500)
    assert load.run(measured(load)).speed > 0.955 * max(fixed_speeds(load).values())


@given(
    num_reqs=st.sampled_from(NUM_REQS),
    rates=st.lists(st.floats(0, 1), min_size=16, max_size=16),
    has_model=st.booleans(),
    match_rate=st.floats(0.05, 1),
    seed=st.integers(0, 999),
)
@settings(max_examples=40)
def test_it_is_never_much_slower_than_off(
    num_reqs: int, rates: list[float], has_model: bool, match_rate: float, seed: int
) -> None:
    """Requests that differ, drafts that come now and then."""
    load = Load(num_reqs, lambda index, at: rates[index], has_model, match_rate, 1000, seed)
    assert load.run(measured(load)).speed > 0.97 * load.run(FixedLength(0)).speed


@pytest.mark.parametrize("has_model", [False, True])
def test_it_turns_off_and_comes_back(has_model: bool) -> None:
    """Drafts that are good, then bad, then good: off in the middle and on again at the end."""
    load = Load(1, lambda index, at: 0.03 if 600 <= at < 1800 else 0.95, has_model, 1.0, 3600)
    run = load.run(measured(load))
    emitted, middle, late = 0.0, [], []
    for length in run.lengths:
        emitted += 1 + (length if not 600 <= emitted < 1800 else 0) * 0.85
        if 900 < emitted < 1700:
            middle.append(length)
        if emitted > 2800:
            late.append(length)
    assert sum(length > 0 for length in middle) < 0.05 * len(middle)
    assert sum(length == LENGTHS[-1] for length in late) > 0.8 * len(late)
    assert run.speed > max(fixed_speeds(load).values())


def test_a_mixed_load_gets_a_length_for_each_request() -> None:
    """One request that copies among others that do not: no fixed length serves both."""
    load = Load(4, lambda index, at: 0.97 if index == 0 else 0.02, match_rate=1.0)
    policy = measured(load)
    run = load.run(policy)
    assert run.speed > 0.97 * max(fixed_speeds(load).values())
    batch = Batch([f"r{index}" for index in range(4)], "greedy")
    first, *others = policy.allowances(batch, LENGTHS[-1])
    assert first == LENGTHS[-1]
    assert others == [1, 1, 1]  # one draft keeps learning, and costs nothing in a wide cell


def test_a_draft_that_few_have_is_not_worth_a_wide_cell() -> None:
    """One long match among sixteen requests: its cell would run 112 rows for one request."""
    load = Load(16, lambda index, at: 0.95)
    policy = measured(load)
    batch = Batch([f"r{index}" for index in range(16)], "greedy")
    for request_id in batch.request_ids:
        for _ in range(30):
            policy.observe(request_id, 6, 6)
    assert policy.worthwhile(batch, [6] * 16) == [3] * 16  # 6 costs 1.8 times what 3 do
    assert policy.worthwhile(batch, [6] + [0] * 15) == [0] * 16
    assert policy.worthwhile(batch, [0] * 16) == [0] * 16


def test_nobody_probes_where_nothing_could_pay() -> None:
    """Sixteen requests of a model on two cores: no length pays at an acceptance of 90 %."""
    load = Load(16, lambda index, at: 0.95, has_model=True)
    assert set(load.run(measured(load)).lengths[40:]) == {0}


def test_a_length_in_use_stays_without_a_clear_winner() -> None:
    """Loads at a threshold that change the length every step."""
    load = Load(4, lambda index, at: 0.52)
    lengths = load.run(measured(load)).lengths[100:]
    changes = sum(a != b for a, b in pairwise(lengths))
    assert changes < 0.1 * len(lengths)
