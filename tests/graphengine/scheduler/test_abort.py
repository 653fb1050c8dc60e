"""Scheduler: a request dropped at any point gives everything back and disturbs nobody."""

from collections.abc import Callable

import pytest

from graphengine.commit import CommitError, commit
from graphengine.request import Request, RequestStatus
from graphengine.scheduler import StepPlan
from tests.graphengine.scheduler.simulation import Simulation, make_request, make_scheduler


def stage_waiting(sim: Simulation, victim: Request) -> StepPlan | None:
    return None


def stage_between_chunks(sim: Simulation, victim: Request) -> StepPlan | None:
    while not 0 < victim.kv_len < victim.num_tokens - 1:
        sim.step()
    return None


def stage_after_draft(sim: Simulation, victim: Request) -> StepPlan | None:
    while not victim.num_output_tokens:
        sim.step()
    return sim.schedule()


def stage_before_chunk_is_recorded(sim: Simulation, victim: Request) -> StepPlan | None:
    while victim.status is RequestStatus.WAITING:
        plan = sim.schedule()
        if victim.status is RequestStatus.WAITING:
            sim.run_chunks(plan)
            for decode in plan.decodes:
                sim.run_decode(decode)
    return plan


def stage_between_steps(sim: Simulation, victim: Request) -> StepPlan | None:
    while victim.num_output_tokens < 5:
        sim.step()
    return None


def stage_preempted(sim: Simulation, victim: Request) -> StepPlan | None:
    stage_between_steps(sim, victim)
    sim.scheduler.preempt(victim)
    return None


@pytest.mark.parametrize(
    "stage",
    [
        stage_waiting,
        stage_between_chunks,
        stage_before_chunk_is_recorded,
        stage_after_draft,
        stage_between_steps,
        stage_preempted,
    ],
)
def test_abort_at_any_point(stage: Callable[[Simulation, Request], StepPlan | None]) -> None:
    """Guards against blocks or rows lost, or neighbours changed, by an abort (case 26)."""
    sim = Simulation(make_scheduler(max_num_batched_tokens=8), ladder=(0, 3))
    sim.add(make_request("0", range(10), 40))
    victim = sim.add(make_request("victim", range(30, 50), 40))
    sim.add(make_request("2", range(10), 12))
    plan = stage(sim, victim)
    emitted = victim.output_token_ids
    assert sim.scheduler.abort("victim") is victim
    sim.audit()
    assert victim.status is RequestStatus.FINISHED
    assert victim.finish_reason == "abort"
    assert sim.scheduler.abort("victim") is None  # twice
    if plan is not None:
        sim.run_chunks(plan)  # the rest of the step, without the victim
        for decode in plan.decodes:
            sim.run_decode(decode)
    sim.drain()
    sim.check_outputs()
    assert victim.output_token_ids == emitted


def test_unknown_and_finished_ids_are_ignored() -> None:
    """Guards against a late abort crashing the engine or hitting a reused id's successor."""
    sim = Simulation(make_scheduler())
    sim.add(make_request("a", [1], 2))
    assert sim.scheduler.abort("nobody") is None
    sim.drain()
    assert sim.scheduler.abort("a") is None
    assert not sim.scheduler.has_unfinished_requests


def test_finishing_twice_is_an_error() -> None:
    """Guards against blocks given back twice."""
    sim = Simulation(make_scheduler())
    request = sim.add(make_request("a", [1], 2))
    sim.drain()
    with pytest.raises(AssertionError, match="not unfinished"):
        sim.scheduler.finish(request, "stop")


def test_a_result_of_an_aborted_request_cannot_be_committed() -> None:
    """Guards against a verify result landing in blocks that belong to nobody (case 26)."""
    sim = Simulation(make_scheduler())
    request = sim.add(make_request("a", [1], 20))
    sim.schedule()
    sim.scheduler.abort("a")
    with pytest.raises(CommitError, match="not decoding"):
        commit(sim.scheduler.kv, request, [7], 0)
    with pytest.raises(AssertionError, match="added before"):
        sim.scheduler.add(request)
    assert request.output_token_ids == []


def test_two_hundred_short_requests_leave_nothing_behind() -> None:
    """Guards against a leak at block size 16, K = 4, one in five aborted, some preempted (8)."""
    scheduler = make_scheduler(
        num_blocks=10, block_size=16, max_num_seqs=8, max_num_batched_tokens=48
    )
    sim = Simulation(scheduler, ladder=(0, 1, 4), seed=8, ragged=True)
    draw = sim.random
    for i in range(200):
        prompt = [draw.randrange(90) for _ in range(draw.randint(1, 30))]
        sim.add(make_request(str(i), prompt, draw.randint(1, 33)))
    doomed = {str(i) for i in range(0, 200, 5)}
    while sim.scheduler.has_unfinished_requests:
        sim.step()
        running = [r.request_id for r in sim.scheduler.running if r.request_id in doomed]
        if running and draw.random() < 0.5:
            sim.scheduler.abort(running[0])
            sim.audit()
    sim.check_outputs()
    assert any(r.finish_reason == "abort" for r in sim.requests)
    assert sum(r.metrics.num_preemptions for r in sim.requests) > 0
