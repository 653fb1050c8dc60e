"""Self-draft: the target drafts for itself, so every draft must be accepted, at every position.

A slip of one in draft KV, positions, rollback or catch-up shows as a draft that is not (cases 6, 7,
32 and 37). Rows of draft KV that are not valid hold NaN before every step (`draft_watch.py`).
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphengine.sampling.params import SamplingParams
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.harness import Harness, Job
from tests.graphengine.engine.setups import Setup

pytestmark = pytest.mark.parity

EDGES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 15, 16, 17)  # of prompts, around blocks of 4


def start(checkpoint: Path, setup: Setup, **options: Any) -> Harness:
    """An engine whose draft model is its target."""
    engine = setup.start(checkpoint, method="draft_model", model=str(checkpoint), **options)
    return Harness(engine)


def params(max_tokens: int, index: int = 0, *, temperature: float = 0.0) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens, ignore_eos=True, temperature=temperature, seed=index
    )


def check_all_accepted(harness: Harness, least: int) -> None:
    """Every draft, of which there were at least so many."""
    stats = harness.engine.stats()
    assert stats.num_draft_tokens >= least
    assert stats.num_accepted_tokens == stats.num_draft_tokens, stats.accepted_per_position
    assert stats.compile_events_after_warmup == 0


def random_jobs(seed: int, num_jobs: int, longest: int) -> list[Job]:
    """Joins, leaves and aborts; prompts that share their beginnings."""
    draw = random.Random(seed)
    stem = tuple(draw.randrange(256) for _ in range(longest))
    jobs, now = [], 0
    for index in range(num_jobs):
        length, now = draw.choice(EDGES), now + draw.choice((0, 0, 1, 3))
        shared = draw.randint(0, length)
        tail = tuple(draw.randrange(256) for _ in range(length - shared))
        jobs.append(
            Job(
                request_id=f"job-{index}",
                prompt=stem[:shared] + tail,
                params=params(draw.randint(5, 40), index),
                arrives=now,
                aborts=now + draw.randrange(1, 9) if draw.random() < 0.15 else None,
            )
        )
    return jobs


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_all_drafts_are_accepted_through_joins_aborts_and_preemption(
    k: int, checkpoints: Checkpoints
) -> None:
    """Guards case 6 at every k; 40 requests over a pool for three or so."""
    setup = Setup(k=k, max_num_seqs=6, num_blocks=26, budget=40)
    harness = start(checkpoints.get(), setup)
    harness.run(random_jobs(k, 40, 20))
    check_all_accepted(harness, 200)
    assert harness.engine.stats().num_preemptions > 0
    harness.engine.close()


@pytest.mark.parametrize("batch", [1, 5, 16])
def test_all_drafts_are_accepted_for_500_steps(batch: int, checkpoints: Checkpoints) -> None:
    """Guards acceptance that decays with time, at batch sizes with padding and without."""
    setup = Setup(k=3, max_num_seqs=16, num_reqs=(1, 6, 12), max_model_len=256)
    engine = setup.start(checkpoints.get(), method="draft_model", model=str(checkpoints.get()))
    while engine.stats().num_steps < 500:
        for index in range(batch):
            engine.add_request(str(index), [index + 1] * (index % 7 + 1), params(240, index))
        while engine.has_unfinished_requests():
            engine.step()
    stats = engine.stats()
    assert stats.num_draft_tokens > 500 * batch * 2
    assert stats.num_accepted_tokens == stats.num_draft_tokens, stats.accepted_per_position
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_500_steps_of_everything(k: int, checkpoints: Checkpoints) -> None:
    """Guards the same at every k through joins, leaves, aborts and preemption, up to batch 16."""
    harness = start(checkpoints.get(), Setup(k=k, max_num_seqs=16, num_blocks=70, budget=90))
    for index in range(16):  # all at once, and more than the pool holds
        harness.add(f"r{index}", [index + 1] * (index % 7 + 1), params(40, index))
    harness.drain()
    seed = 0
    while harness.num_steps < 500:
        jobs = random_jobs(100 * k + seed, 40, 20)
        harness.run([replace(job, request_id=f"{seed}-{job.request_id}") for job in jobs])
        seed += 1
    check_all_accepted(harness, 2000)
    assert harness.engine.stats().num_preemptions > 0
    assert max(harness.batch_sizes) == 16
    harness.engine.close()


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("length", EDGES)
def test_every_residue_of_a_prompt_to_a_block(
    length: int, block_size: int, checkpoints: Checkpoints
) -> None:
    """Guards case 7: alone, then as a cached prompt, then behind its own answer."""
    harness = start(checkpoints.get(), Setup(k=5, block_size=block_size))
    prompt = list(range(3, 3 + length))
    for turn in range(3):
        harness.add(f"turn-{turn}", prompt, params(12))
        harness.drain()
    harness.add("longer", prompt + harness.stream("turn-0"), params(12))
    harness.drain()
    check_all_accepted(harness, 4 * 8)
    harness.engine.close()


@pytest.mark.parametrize("budget", [4, 5, 13])
def test_chunked_prompts(budget: int, checkpoints: Checkpoints) -> None:
    """Guards case 32: chunks of any size leave the same draft KV."""
    harness = start(checkpoints.get(), Setup(k=3, budget=budget))
    for index, length in enumerate((13, 30, 9)):
        harness.add(f"r{index}", list(range(1, 1 + length)), params(20, index))
    harness.drain()
    check_all_accepted(harness, 20)
    harness.engine.close()


@pytest.mark.parametrize("schedule", [(3, 3, 0, 0, 0, 3, 3), (3, *[0] * 20, 3, 1, 3, 0, 2)])
def test_pauses_are_caught_up(schedule: tuple[int, ...], checkpoints: Checkpoints) -> None:
    """Guards case 37: steps without drafts, few and many, leave no hole in the draft KV."""
    harness = start(checkpoints.get(), Setup(k=3, max_num_seqs=9, max_model_len=128))
    for index in range(9):
        harness.add(f"r{index}", [index + 1] * (index + 1), params(80, index))
    for turn in range(200):
        if not harness.engine.has_unfinished_requests():
            break
        harness.engine.draft_limit = schedule[turn % len(schedule)]
        harness.step()
    check_all_accepted(harness, 200)
    harness.engine.close()


def test_a_long_gap_is_caught_up_in_steps_of_bounded_cost(checkpoints: Checkpoints) -> None:
    """Guards batch mates that would wait for thousands of draft rows in one step."""
    setup = Setup(k=3, max_num_seqs=3, max_model_len=512)
    harness = start(checkpoints.get(), setup)
    harness.engine.draft_limit = 0
    for index in range(3):
        harness.add(f"r{index}", [index + 1] * 300, params(40, index))
    while any(request.kv_len < 299 for request in harness.requests.values()):
        harness.step()
    harness.engine.draft_limit = 3
    before = {name: request.draft_kv_len for name, request in harness.requests.items()}
    assert not any(before.values())
    filled = 0
    while filled < 3 * 300:
        harness.step()
        lengths = {name: request.draft_kv_len for name, request in harness.requests.items()}
        now = sum(lengths.values())
        assert now - filled <= 256 + 3 * (3 + 2), "more than a forward's rows in one step"
        assert now > filled, "a gap that is not closed"
        filled = now
    harness.drain()
    check_all_accepted(harness, 60)
    harness.engine.close()


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_who_is_never_drafted_for_costs_no_draft_pass(
    max_tokens: int, checkpoints: Checkpoints
) -> None:
    """Guards case 26: one token to come, or two, of which the second is the bonus."""
    harness = start(checkpoints.get(), Setup(k=3))
    harness.add("short", [5] * 20, params(max_tokens))
    harness.drain()
    stats = harness.engine.stats()
    assert not [key for key in stats.replays if key.endswith(":draft")] or max_tokens == 2
    assert ("fill:draft_model" in stats.eager_fallbacks) == (max_tokens == 2)
    harness.engine.close()


@pytest.mark.parametrize("alone", [True, False])
def test_drafts_at_the_context_limit_are_a_row_s_own(alone: bool, checkpoints: Checkpoints) -> None:
    """Guards rows near the limit that are drafted for, or not, as their batch mates allow."""
    harness = start(checkpoints.get(), Setup(k=6, max_model_len=64))
    if not alone:
        harness.add("mate", [9] * 5, params(50, 1))
    harness.add("long", [5] * 58, params(6))
    harness.drain()
    request = harness.requests["long"]
    assert request.metrics.num_draft_tokens == request.metrics.num_accepted_tokens > 0
    assert request.metrics.num_steps == 1, "five of the last six tokens are drafted in one step"
    harness.engine.close()


@pytest.mark.parametrize("graph", ["tape", "compiled", "eager"])
def test_coupled_drafts_are_the_target_s_own_draws(graph: Any, checkpoints: Checkpoints) -> None:
    """Guards the noise of captured drafts: position, seed and choice are those of the target."""
    harness = start(
        checkpoints.get(), Setup(k=3, graph=graph, debug=True), draft_sampling="coupled"
    )
    for index in range(5):
        temperature = (0.0, 0.3, 1.0, 1.7, 4.0)[index]
        harness.add(f"r{index}", [index + 1], params(40, index, temperature=temperature))
    harness.drain()
    check_all_accepted(harness, 100)
    harness.engine.close()


def test_drawn_drafts_with_p_equal_to_q(checkpoints: Checkpoints) -> None:
    """Guards the distribution that is handed over: it is that of the drafts, which is p."""
    setup = Setup(k=3, verification="rejection")
    harness = start(checkpoints.get(), setup, draft_sampling="probabilistic")
    for index in range(5):
        temperature = (0.0, 0.3, 1.0, 1.7, 4.0)[index]
        harness.add(f"r{index}", [index + 1], params(40, index, temperature=temperature))
    harness.drain()
    check_all_accepted(harness, 100)
    harness.engine.close()


@pytest.mark.parametrize("name", ["qwen3", "window"])
@pytest.mark.parametrize("compile_mode", ["native", "off", "inductor"])
def test_other_architectures_and_pieces(
    name: str, compile_mode: Any, checkpoints: Checkpoints
) -> None:
    harness = start(checkpoints.get(name), Setup(k=3, compile=compile_mode, dtype="bfloat16"))
    for index in range(4):
        harness.add(f"r{index}", [index + 1] * 9, params(40, index))
    harness.drain()
    check_all_accepted(harness, 80)
    harness.engine.close()
