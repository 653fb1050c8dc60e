"""Scheduler: how many drafts each request may have, and what they may not cost anybody."""

import pytest

from tests.graphengine.scheduler.simulation import (
    FULL_LADDER,
    Simulation,
    make_request,
    make_scheduler,
    num_batched_tokens,
)


def test_decodes_count_k_plus_one_against_the_budget_beside_chunks() -> None:
    """Guards against a decode counted as one row: budget 16, 4 decodes K=3, 100 tokens (25)."""
    scheduler = make_scheduler(max_num_batched_tokens=16, max_model_len=128, max_num_seqs=5)
    sim = Simulation(scheduler, ladder=(0, 1, 2, 3))
    small = [sim.add(make_request(str(i), [i, i], 60, max_model_len=128)) for i in range(4)]
    while not all(r.num_output_tokens for r in small):
        sim.step()
    assert sim.step().k == 3
    long = sim.add(make_request("long", range(100), 4, max_model_len=128))
    plan = sim.step()
    assert [decode.request for decode in plan.decodes] == small
    assert plan.k == 1  # half of the budget is left to the prompt
    assert sum(c.num_tokens for c in plan.chunks) == 8
    assert num_batched_tokens(plan) == 16
    for _ in range(13):  # 99 tokens at 8 a step, and the first answer
        sim.step()
    assert long.num_output_tokens > 0, "the prompt was starved by drafts"
    sim.drain()
    sim.check_outputs()


def test_a_short_prompt_costs_drafts_only_what_it_needs() -> None:
    """Guards against half of the budget being left idle while a small prompt starts."""
    sim = Simulation(make_scheduler(max_num_batched_tokens=16), ladder=(0, 1, 2, 3, 6))
    for i in range(2):
        sim.add(make_request(str(i), [i], 50))
    sim.step()
    assert sim.step().k == 6
    sim.add(make_request("short", range(5), 50))
    plan = sim.step()
    assert (plan.k, num_batched_tokens(plan)) == (3, 12)
    sim.drain()


def test_a_budget_of_one_row_each_still_makes_progress() -> None:
    """Guards against prefill or decode starving when the budget equals max_num_seqs (25)."""
    sim = Simulation(make_scheduler(max_num_seqs=4, max_num_batched_tokens=4), accept=99)
    for i in range(9):
        sim.add(make_request(str(i), range(i, i + 15), 9))
    sim.drain(max_steps=400)
    sim.check_outputs()


def test_drafts_shrink_before_anybody_is_preempted() -> None:
    """Guards against lookahead blocks counted as need: all prompts fit, K > bs does not (25)."""
    # Three requests that end with 4 blocks each fill the pool to the last block.
    sim = Simulation(make_scheduler(num_blocks=13, max_num_seqs=3), ladder=(0, 1, 2, 5), accept=99)
    for i in range(3):
        sim.add(make_request(str(i), range(20 * i, 20 * i + 9), 8))
    sim.drain()
    sim.check_outputs()
    assert sum(r.metrics.num_preemptions for r in sim.requests) == 0
    assert len({plan.k for plan in sim.plans}) > 1, "the pool never was scarce"


def test_scarce_blocks_are_shared_among_drafting_requests() -> None:
    """Guards against the oldest request drafting with everything and the others with nothing."""
    scheduler = make_scheduler(num_blocks=8, max_num_seqs=3)
    sim = Simulation(scheduler, ladder=(0, 8), accept=0)
    for i in range(3):
        sim.add(make_request(str(i), [i], 16))
    plan = sim.step()
    # One block each for the row, of which three slots are left, and four blocks among three.
    assert [decode.max_draft_tokens for decode in plan.decodes] == [8, 7, 7]
    assert plan.k == 8


def test_the_cell_is_no_wider_than_the_longest_draft() -> None:
    """Guards against verifying padding rows that no request can use."""
    sim = Simulation(make_scheduler(), ladder=FULL_LADDER)
    sim.add(make_request("a", [1], 4))
    sim.add(make_request("b", [2], 2))
    plan = sim.schedule()
    assert plan.k == 3
    assert [decode.max_draft_tokens for decode in plan.decodes] == [3, 1]
    assert num_batched_tokens(plan) == 8


@pytest.mark.parametrize("max_tokens", [1, 2, 4, 5, 6, 10, 11])
@pytest.mark.parametrize("accept", [0, 2, 99])
def test_max_tokens_is_met_exactly(max_tokens: int, accept: int) -> None:
    """Guards against tokens past max_tokens, and wasted passes (cases 26, 43); K = 4."""
    sim = Simulation(make_scheduler(), ladder=(0, 4), accept=accept)
    request = sim.add(make_request("a", [1], max_tokens))
    sim.drain()
    sim.check_outputs()
    assert request.num_output_tokens == max_tokens
    assert request.finish_reason == "length"
    if max_tokens == 1:
        assert request.metrics.num_draft_tokens == 0
    if accept == 99:
        assert request.metrics.num_steps == -(-max_tokens // 5)


@pytest.mark.parametrize("length", range(55, 64))
@pytest.mark.parametrize("accept", [0, 3, 99])
def test_the_context_limit_is_met_exactly(length: int, accept: int) -> None:
    """Guards against a row at or past max_model_len in the last K tokens (case 27); K = 8."""
    sim = Simulation(make_scheduler(), ladder=(0, 1, 2, 3, 5, 8), accept=accept)
    request = sim.add(make_request("a", range(length), None))
    sim.drain()
    sim.check_outputs()
    assert request.num_tokens == 64
    assert request.finish_reason == "length"


def test_a_prompt_of_the_whole_context_is_refused() -> None:
    """Guards against a prompt that leaves no position for an answer (case 27, L = 64)."""
    with pytest.raises(ValueError, match="max_model_len is 64"):
        make_scheduler().add(make_request("a", range(64), None))


@pytest.mark.parametrize("length", range(1, 10))
def test_every_block_residue_has_its_lookahead(length: int) -> None:
    """Guards against missing slots from waiting, after resume and after a hit (7); bs 4, K 5."""
    sim = Simulation(make_scheduler(), ladder=(0, 5), accept=99)
    for name in ("waiting", "hit"):
        sim.add(make_request(name, range(length), 20))
        sim.drain()
    resumed = sim.add(make_request("resumed", range(length), 20))
    while resumed.num_output_tokens < 3:
        sim.step()
    sim.scheduler.preempt(resumed)
    sim.audit()
    sim.drain()
    sim.check_outputs()
    for request in sim.requests:
        # The truth was drafted, so anything not accepted was lost to a slip.
        metrics = request.metrics
        assert metrics.num_accepted_tokens == metrics.num_draft_tokens
        assert metrics.num_steps == 4


@pytest.mark.parametrize("ladder", [(), (1, 2), (0, 2, 1), (0, 0)])
def test_a_ladder_that_does_not_ascend_from_zero_is_refused(ladder: tuple[int, ...]) -> None:
    """Guards against a step for which no cell was captured."""
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1], 4))
    with pytest.raises(AssertionError, match="draft ladder"):
        scheduler.schedule(ladder)
