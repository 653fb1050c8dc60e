"""Random lives of many requests: every promise of scheduler and KV manager, after every change.

The checks are in `simulation.py`; what is here decides what happens to whom.
"""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from graphengine.scheduler import Scheduler
from tests.graphengine.scheduler.simulation import (
    FULL_LADDER,
    VOCAB,
    Simulation,
    make_request,
    make_scheduler,
)

LADDERS = ((0,), (0, 1, 2, 3, 6), (0, 5), FULL_LADDER)


def tight_scheduler(draw: random.Random, block_size: int, *, chunked: bool) -> Scheduler:
    """Room for the largest request and not much more."""
    max_model_len = draw.choice([12, 24, 48])
    max_num_seqs = draw.choice([1, 2, 4, 6])
    needed = -(-(max_model_len - 1) // block_size)
    budget = max(max_num_seqs, draw.randint(4, 40))
    return make_scheduler(
        num_blocks=1 + needed + draw.randint(0, needed),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget if chunked else max_model_len + draw.randint(0, 9),
        max_model_len=max_model_len,
        chunked=chunked,
        caching=draw.random() < 0.6,
    )


def random_prompt(draw: random.Random, max_model_len: int) -> list[int]:
    """Half of the prompts share a prefix of random length with the others."""
    length = draw.randint(1, max_model_len - 1)
    shared = draw.randint(0, length) if draw.random() < 0.5 else 0
    return [*range(shared), *(draw.randrange(VOCAB) for _ in range(length - shared))]


def random_life(seed: int, block_size: int, *, chunked: bool) -> Simulation:
    """Arrivals, aborts, stops and acceptance drawn from `seed`, run to the end."""
    draw = random.Random(seed)
    scheduler = tight_scheduler(draw, block_size, chunked=chunked)
    sim = Simulation(
        scheduler,
        ladder=draw.choice(LADDERS),
        seed=seed,
        accept=draw.choice([None, None, 0, 99]),
        ragged=draw.random() < 0.5,
    )
    max_model_len = scheduler.config.max_model_len
    to_come = draw.randint(2, 12)
    while to_come or scheduler.has_unfinished_requests:
        while to_come and (draw.random() < 0.4 or not scheduler.has_unfinished_requests):
            to_come -= 1
            sim.add(
                make_request(
                    str(to_come),
                    random_prompt(draw, max_model_len),
                    draw.choice([None, None, 1, 2, 7]),
                    max_model_len=max_model_len,
                    ignore_eos=draw.random() < 0.7,
                    stop_token_ids=tuple(draw.sample(range(VOCAB), draw.choice([0, 0, 2]))),
                )
            )
        action = draw.random()
        if action < 0.03:
            scheduler.abort(draw.choice(sim.requests).request_id)
            sim.audit()
        elif action < 0.05:
            sim.schedule()  # a step that dies before its results come back
        elif action < 0.1:
            plan = sim.schedule()
            scheduler.abort(draw.choice(sim.requests).request_id)
            sim.audit()
            sim.run_chunks(plan)
            for decode in plan.decodes:
                sim.run_decode(decode)
                sim.audit()
        else:
            sim.step()
        if not to_come and draw.random() < 0.1:
            sim.drain()
    sim.check_outputs()
    return sim


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_random_lives_keep_every_promise(block_size: int, chunked: bool) -> None:
    """Guards against a leak, a wrong token, a broken budget or a stall in any mixture."""
    sims = [random_life(seed, block_size, chunked=chunked) for seed in range(50)]
    # What the run must have met, or it proved little.
    assert sum(sim.num_steps for sim in sims) > 500
    assert sum(r.metrics.num_preemptions for sim in sims for r in sim.requests) > 3
    assert sum(r.metrics.num_cached_tokens for sim in sims for r in sim.requests) > 5
    reasons = {r.finish_reason for sim in sims for r in sim.requests}
    assert reasons == {"stop", "length", "abort"}


@pytest.mark.soak
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_random_lives_for_long(block_size: int, chunked: bool) -> None:
    """The same over many more seeds."""
    for seed in range(1000, 2000):
        random_life(seed, block_size, chunked=chunked)


class SchedulerMachine(RuleBasedStateMachine):
    """Lets hypothesis look for the shortest sequence of calls that breaks a promise."""

    @initialize(
        seed=st.integers(0, 2**16),
        block_size=st.sampled_from([1, 4, 16]),
        chunked=st.booleans(),
        ladder=st.sampled_from(LADDERS),
    )
    def start(self, seed: int, block_size: int, chunked: bool, ladder: tuple[int, ...]) -> None:
        scheduler = tight_scheduler(random.Random(seed), block_size, chunked=chunked)
        self.sim = Simulation(scheduler, ladder=ladder, seed=seed, ragged=True)

    @rule(length=st.integers(1, 47), shared=st.integers(0, 47), max_tokens=st.integers(1, 48))
    def arrive(self, length: int, shared: int, max_tokens: int) -> None:
        max_model_len = self.sim.scheduler.config.max_model_len
        length = min(length, max_model_len - 1)
        number = len(self.sim.requests)
        prompt = [*range(min(shared, length)), *([50 + number % 40] * (length - shared))]
        self.sim.add(
            make_request(
                str(number), prompt, max_tokens, max_model_len=max_model_len, ignore_eos=False
            )
        )

    @precondition(lambda self: self.sim.scheduler.has_unfinished_requests)
    @rule()
    def step(self) -> None:
        self.sim.step()

    @precondition(lambda self: self.sim.scheduler.has_unfinished_requests)
    @rule()
    def lose_a_step(self) -> None:
        self.sim.schedule()

    @precondition(lambda self: self.sim.scheduler.running)
    @rule()
    def preempt(self) -> None:
        # The youngest, as the scheduler itself does: that keeps service in order.
        self.sim.scheduler.preempt(self.sim.scheduler.running[-1])
        self.sim.audit()

    @precondition(lambda self: self.sim.requests)
    @rule(index=st.integers(0, 50))
    def abort(self, index: int) -> None:
        requests = self.sim.requests
        self.sim.scheduler.abort(requests[index % len(requests)].request_id)
        self.sim.audit()

    @precondition(lambda self: self.sim.scheduler.has_unfinished_requests)
    @rule(index=st.integers(0, 50))
    def abort_in_mid_step(self, index: int) -> None:
        plan = self.sim.schedule()
        self.abort(index)
        self.sim.run_chunks(plan)
        for decode in plan.decodes:
            self.sim.run_decode(decode)

    def teardown(self) -> None:
        if hasattr(self, "sim"):
            self.sim.drain()
            self.sim.check_outputs()


SchedulerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None
)
TestSchedulerMachine = SchedulerMachine.TestCase
