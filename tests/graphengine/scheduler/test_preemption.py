"""Scheduler: who yields when the pool is dry, and what becomes of it."""

import pytest

from graphengine.commit import CommitError, commit
from graphengine.request import RequestStatus
from tests.graphengine.scheduler.simulation import (
    Simulation,
    expected_output,
    make_request,
    make_scheduler,
)


def crowded(k: int, *, caching: bool = True, chunked: bool = True) -> Simulation:
    """Three requests on a pool for two and a half."""
    scheduler = make_scheduler(
        num_blocks=14,
        max_num_seqs=3,
        max_model_len=32,
        caching=caching,
        chunked=chunked,
        max_num_batched_tokens=32 if not chunked else 6,
    )
    sim = Simulation(scheduler, ladder=tuple(sorted({0, k})), accept=1)
    shared = [1, 2, 3, 4, 5]
    for i in range(3):
        sim.add(make_request(str(i), [*shared, 10 + i], 18, max_model_len=32))
    return sim


@pytest.mark.parametrize("k", [0, 1, 3, 5])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_output_is_that_of_a_big_pool(k: int, caching: bool, chunked: bool) -> None:
    """Guards against stale drafts, counts or tokens after a resume (cases 23, 30)."""
    sim = crowded(k, caching=caching, chunked=chunked)
    sim.drain()
    sim.check_outputs()
    assert sum(r.metrics.num_preemptions for r in sim.requests) > 0, "nobody was preempted"
    assert sim.requests[0].metrics.num_preemptions == 0, "the oldest yielded to a younger one"


def test_the_last_to_arrive_yields_and_goes_to_the_front() -> None:
    """Guards against an old request losing its work to a young one."""
    sim = crowded(0)
    while not (plan := sim.step()).preempted:
        pass
    assert plan.preempted == [sim.requests[2]]
    victim = plan.preempted[0]
    waiting = sim.add(make_request("late", [1], 4, max_model_len=32))
    assert list(sim.scheduler.waiting) == [victim, waiting]
    assert victim.row is None
    assert len(victim.block_table) == victim.kv_len == victim.num_reserved_rows == 0
    assert victim.num_output_tokens > 0, "its tokens were dropped"
    kept = victim.num_tokens
    sim.drain()
    sim.check_outputs()
    first = next(c for p in sim.plans[sim.plans.index(plan) :] for c in p.chunks)
    assert first.request is victim
    assert first.start + first.num_tokens <= kept - 1


def test_old_output_is_prefilled_again_as_output() -> None:
    """Guards against "no output yet" standing for "in prefill" after a resume (case 30)."""
    sim = Simulation(make_scheduler(caching=False), ladder=(0, 3), accept=99)
    request = sim.add(make_request("a", range(6), 12))
    while request.num_output_tokens < 3:
        sim.step()
    emitted = request.output_token_ids
    sim.scheduler.preempt(request)
    plan = sim.step()
    assert [(c.start, c.num_tokens) for c in plan.chunks] == [(0, 6 + len(emitted) - 1)]
    assert request.output_token_ids == emitted
    assert request.num_prompt_tokens == 6
    sim.drain()
    sim.check_outputs()


def test_cached_prompt_tokens_are_counted_at_first_admission_only() -> None:
    """Guards against a request's own recompute being reported as a prefix hit."""
    sim = Simulation(make_scheduler(), ladder=(0,))
    request = sim.add(make_request("a", range(9), 12))
    while request.num_output_tokens < 3:
        sim.step()
    sim.scheduler.preempt(request)
    sim.step()
    assert request.kv_len >= 8
    assert request.metrics.num_cached_tokens == 0


def test_a_result_under_way_is_dropped() -> None:
    """Guards against a verify result landing in blocks freed by a preemption (case 23)."""
    sim = Simulation(make_scheduler(), ladder=(0, 3))
    request = sim.add(make_request("a", range(5), 12))
    while not sim.schedule().decodes:
        sim.scheduler.advance_prefill(sim.plans[-1].chunks[0])
    sim.scheduler.preempt(request)
    with pytest.raises(CommitError, match="not decoding"):
        commit(sim.scheduler.kv, request, [7], 0)
    sim.audit()
    assert request.num_output_tokens == 0
    sim.cache.clear()
    plan = sim.schedule()
    stale = plan.chunks
    if stale:
        sim.scheduler.preempt(request)
        with pytest.raises(AssertionError, match="not in prefill"):
            sim.scheduler.advance_prefill(stale[0])
    assert request.status is RequestStatus.WAITING or not stale


@pytest.mark.parametrize("num_blocks", range(9, 20))
def test_no_deadlock_or_livelock_at_any_pool_size(num_blocks: int) -> None:
    """Guards against requests that preempt each other for ever (case 25); K > bs."""
    scheduler = make_scheduler(
        num_blocks=num_blocks,
        block_size=2,
        max_num_seqs=4,
        max_model_len=17,
        max_num_batched_tokens=12,
    )
    sim = Simulation(scheduler, ladder=(0, 1, 3, 5), seed=num_blocks)
    for i in range(8):
        sim.add(make_request(str(i), range(i, i + 3 + i), None, max_model_len=17))
    sim.drain(max_steps=600)
    sim.check_outputs()


def test_a_long_prompt_in_chunks_makes_younger_ones_yield() -> None:
    """Guards against two half-prefilled prompts that hold the pool between them for ever."""
    scheduler = make_scheduler(num_blocks=12, max_num_seqs=3, max_num_batched_tokens=3)
    sim = Simulation(scheduler, ladder=(0, 2))
    for i in range(3):
        sim.add(make_request(str(i), range(30 * i, 30 * i + 35), 8))
    sim.drain(max_steps=300)
    sim.check_outputs()


def test_an_uncommitted_step_is_scheduled_again() -> None:
    """Guards against rows of an interrupted step staying reserved for ever."""
    sim = Simulation(make_scheduler(num_blocks=9), ladder=(0, 5), accept=99)
    request = sim.add(make_request("a", range(5), 12))
    sim.step()
    first = sim.schedule()
    used = sim.scheduler.kv.stats().num_used
    second = sim.schedule()
    assert [decode.max_draft_tokens for decode in first.decodes] == [5]
    assert [decode.max_draft_tokens for decode in second.decodes] == [5]
    assert sim.scheduler.kv.stats().num_used == used
    sim.run_decode(second.decodes[0])
    sim.drain()
    assert request.output_token_ids == expected_output(request)


def test_rows_of_a_lost_step_are_given_back_when_the_next_one_drafts_less() -> None:
    """Guards against blocks of an interrupted step staying with requests that need one row."""
    sim = Simulation(make_scheduler(), ladder=(0, 8))
    for i in range(2):
        sim.add(make_request(str(i), [i], 12))
    plan = sim.schedule()
    assert sim.scheduler.kv.stats().num_used == 6
    sim.run_decode(plan.decodes[0])  # the other result is lost
    sim.ladder = (0,)
    sim.schedule()
    assert [len(r.block_table) for r in sim.requests] == [
        sim.scheduler.kv.blocks_for(r.num_tokens) for r in sim.requests
    ]


def test_no_draft_is_ever_the_cause_of_a_preemption() -> None:
    """Guards against reserved drafts, lost or not, pushing somebody out of the pool (case 25)."""
    # Two requests that need two blocks each, and five; drafts take whatever is left.
    sim = Simulation(make_scheduler(num_blocks=6, max_num_seqs=2), ladder=(0, 8), accept=99)
    for i in range(2):
        sim.add(make_request(str(i), [i] * 4, 5))
    sim.step()
    plan = sim.schedule()
    assert sim.scheduler.kv.stats().num_free <= 1
    sim.run_decode(plan.decodes[1])
    assert not sim.schedule().preempted
    sim.drain()
    sim.check_outputs()
    assert all(r.metrics.num_preemptions == 0 for r in sim.requests)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5, 9])
def test_starting_over_keeps_requests_and_their_tokens(num_steps: int) -> None:
    """Guards against rows, blocks or requests lost by a change that broke off half-way."""
    sim = Simulation(make_scheduler(num_blocks=16, max_num_seqs=3, max_num_batched_tokens=12))
    requests = [sim.add(make_request(str(i), range(i, i + 9), 12)) for i in range(5)]
    for _ in range(num_steps):
        sim.step()
    scheduler = sim.scheduler
    unfinished = [request for request in requests if not request.is_finished]
    if num_steps:  # one that is in no queue, with a block that is in no table
        scheduler.running.pop()
        scheduler.kv.pool.allocate(1)
    assert scheduler.start_over() == unfinished == list(scheduler.waiting)
    assert scheduler.kv.stats().num_used == scheduler.kv.stats().num_cached == 0
    sim.audit()
    sim.drain()
    sim.check_outputs()
    assert sum(request.metrics.num_preemptions for request in requests) >= min(num_steps, 1)


def test_what_had_ended_does_not_start_over() -> None:
    """Guards against a request served again because its end broke off half-way."""
    sim = Simulation(make_scheduler())
    ended, other = (sim.add(make_request(name, range(9), 12)) for name in "ab")
    sim.step()
    ended.status, ended.finish_reason = RequestStatus.FINISHED, "abort"  # and no more
    assert sim.scheduler.start_over() == [other]
    assert ended.row is None
    assert len(ended.block_table) == 0
    sim.audit()
    sim.drain()
    assert other.is_finished
