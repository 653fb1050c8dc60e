"""KV rows under speculation: block edges, leaks, dry pools, preemption and cached prompts.

Cases 6 to 8, 23, 25, 28, 30. Most checks are the harness's: the audit, the NaN in memory that
nobody owns, and the bytes outside a step's own rows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from graphengine.request import Request
from graphengine.sampling.params import SamplingParams
from graphengine.scheduler import StepPlan
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Compile, Setup, scripted, with_torch_ops
from tests.graphengine.scheduler.simulation import num_batched_tokens

PARAMS = SamplingParams(max_tokens=14, ignore_eos=True)


def prompt_of(length: int, start: int = 0) -> tuple[int, ...]:
    return tuple((start + 37 * i) % 256 for i in range(length))


def answers(
    checkpoints: Checkpoints,
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams = PARAMS,
    compile_mode: Compile = "native",
) -> dict[str, list[int]]:
    """Whole streams without speculation, by index."""
    harness = Harness(Setup(compile=compile_mode, prefix=False).start(checkpoints.get()))
    for index, prompt in enumerate(prompts):
        harness.add(str(index), prompt, params)
    harness.drain()
    return {str(i): [*prompt, *harness.stream(str(i))] for i, prompt in enumerate(prompts)}


@pytest.mark.parametrize("name", ["oracle", "junk", "exactly"])
@with_torch_ops
def test_every_residue_of_the_block(
    name: str, compile_mode: Compile, checkpoints: Checkpoints
) -> None:
    """No room for lookahead rows when fewer than k slots are left in the last block (case 7)."""
    prompts = [prompt_of(length, length) for length in range(1, 10)]
    records = answers(checkpoints, prompts, compile_mode=compile_mode)
    setup = Setup(k=5, block_size=4, max_num_seqs=9, compile=compile_mode, prefix=False)
    proposer = scripted(name, records, accept=2)
    harness = Harness(setup.start(checkpoints.get(), proposer))
    for index, prompt in enumerate(prompts):
        harness.add(str(index), prompt, PARAMS)
    while harness.engine.has_unfinished_requests():
        harness.step()
    for index, prompt in enumerate(prompts):
        assert [*prompt, *harness.stream(str(index))] == records[str(index)]
        metrics = harness.outputs[str(index)].metrics
        if name == "oracle":  # 14 tokens in blocks of 6, 6 and 2: every draft is accepted
            assert metrics.num_steps == 3
            assert metrics.num_accepted_tokens == metrics.num_draft_tokens == 11


def test_nothing_leaks_over_many_short_requests(checkpoints: Checkpoints) -> None:
    """Blocks lost by requests that end or are aborted inside a block (case 8)."""
    setup = Setup(k=4, block_size=16, num_blocks=14, max_num_seqs=8, prefix=False)
    harness = Harness(setup.start(checkpoints.get(), scripted("ragged", {}, seed=2)))
    draw = random.Random(4)
    free = harness.engine.kv.stats().num_free
    for index in range(200):
        params = replace(PARAMS, max_tokens=draw.randrange(1, 12))
        harness.add(str(index), prompt_of(draw.randrange(1, 40), index), params)
        if index % 5 == 0:
            harness.abort(str(draw.randrange(max(0, index - 6), index + 1)))
        if index % 3 == 0:
            harness.step()
    harness.drain()
    assert harness.engine.kv.stats().num_free == free
    assert all(len(request.block_table) == 0 for request in harness.requests.values())
    assert sum(r.metrics.num_preemptions for r in harness.requests.values()) > 0
    assert harness.engine.stats().num_preemptions == sum(
        r.metrics.num_preemptions for r in harness.requests.values()
    )


@with_torch_ops
def test_a_dry_pool_truncates_drafts_and_preempts_nobody(
    compile_mode: Compile, checkpoints: Checkpoints
) -> None:
    """Somebody preempted, or stuck, so that another may draft (case 25).

    The first request holds four of five blocks until it ends; the second has one to draft in.
    """
    prompts = [prompt_of(13), prompt_of(1)]
    params = [replace(PARAMS, max_tokens=3), replace(PARAMS, max_tokens=15)]
    records = answers(checkpoints, prompts, params[1], compile_mode)
    setup = Setup(k=6, block_size=4, num_blocks=1 + 5, compile=compile_mode, prefix=False)
    harness = Harness(setup.start(checkpoints.get(), scripted("junk", records)))
    plans = watch_plans(harness)
    for index in range(2):
        harness.add(str(index), prompts[index], params[index])
    harness.drain()
    assert harness.engine.stats().num_preemptions == 0
    for index in range(2):
        most = params[index].max_tokens
        expected = records[str(index)][len(prompts[index]) :][:most]
        assert harness.stream(str(index)) == expected
    assert any(drafts < min(6, most) for _, slots in plans for drafts, most in slots)


Slots = list[tuple[int, int]]


def watch_plans(harness: Harness) -> list[tuple[int, Slots]]:
    """Grows with each step: its rows, and (drafts allowed, drafts left to the limit) by decode."""
    seen: list[tuple[int, Slots]] = []
    schedule = harness.engine.scheduler.schedule

    def watched(ladder: Sequence[int]) -> StepPlan:
        plan = schedule(ladder)
        limits = [(d.max_draft_tokens, d.request.max_draft_tokens) for d in plan.decodes]
        seen.append((num_batched_tokens(plan), limits))
        return plan

    harness.engine.scheduler.schedule = watched  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("block_size", [1, 4])
def test_drafts_longer_than_what_the_pool_has(block_size: int, checkpoints: Checkpoints) -> None:
    """A pool that fits all requests but not one lookahead each, k above the block size (25)."""
    prompts = [prompt_of(9, index) for index in range(4)]
    records = answers(checkpoints, prompts)
    per_request = -(-(9 + 14 - 1) // block_size)
    setup = Setup(k=9, block_size=block_size, num_blocks=2 + 3 * per_request, prefix=False)
    harness = Harness(setup.start(checkpoints.get(), scripted("oracle", records)))
    for index, prompt in enumerate(prompts):
        harness.add(str(index), prompt, PARAMS)
    emitted, since = 0, 0
    while harness.engine.has_unfinished_requests():
        harness.step()
        now = harness.engine.stats().num_emitted_tokens
        emitted, since = now, 0 if now > emitted else since + 1
        assert since <= 4, "no token came out for several steps"
    for index, prompt in enumerate(prompts):
        assert [*prompt, *harness.stream(str(index))] == records[str(index)]


def test_the_token_budget_holds_with_drafts(checkpoints: Checkpoints) -> None:
    """A decode that is counted as one row and runs as k + 1 (case 25)."""
    prompts = [*(prompt_of(2, index) for index in range(4)), prompt_of(50)]
    records = answers(checkpoints, prompts, replace(PARAMS, max_tokens=13))
    setup = Setup(k=3, budget=16, max_num_seqs=5)
    harness = Harness(setup.start(checkpoints.get(), scripted("oracle", records)))
    plans = watch_plans(harness)
    for index, prompt in enumerate(prompts):
        harness.add(str(index), prompt, replace(PARAMS, max_tokens=13))
    harness.drain()
    assert max(rows for rows, _ in plans) <= 16
    assert any(drafts for _, slots in plans for drafts, _ in slots)
    for index, prompt in enumerate(prompts):
        assert [*prompt, *harness.stream(str(index))] == records[str(index)]


@pytest.mark.parametrize("length", [1, 4, 5, 12, 13])
@with_torch_ops
def test_a_prompt_that_is_cached_whole(
    length: int, compile_mode: Compile, checkpoints: Checkpoints
) -> None:
    """The last token run on a cache that holds it already, or a shared block written to (28)."""
    prompt = prompt_of(length)
    records = answers(checkpoints, [prompt], compile_mode=compile_mode)
    setup = Setup(k=3, block_size=4, compile=compile_mode)
    proposer = scripted("oracle", dict.fromkeys("abcde", records["0"]))
    harness = Harness(setup.start(checkpoints.get(), proposer))
    for name in "abc":
        harness.add(name, prompt, PARAMS)
        harness.drain()
    for name in "de":  # two readers at once
        harness.add(name, prompt, PARAMS)
    harness.drain()
    for name in "abcde":
        assert [*prompt, *harness.stream(name)] == records["0"]
        cached = harness.outputs[name].metrics.num_cached_tokens
        assert cached == (0 if name == "a" else (length - 1) // 4 * 4)


@pytest.mark.parametrize(
    ("k", "compile_mode"),
    [(0, "native"), (1, "native"), (3, "native"), (5, "native"), (3, "off")],
    indirect=["compile_mode"],
)
@pytest.mark.parametrize("budget", [None, 6])
def test_preempted_requests_resume_from_the_cache(
    k: int, budget: int | None, compile_mode: Compile, checkpoints: Checkpoints
) -> None:
    """Stale drafts, counts or lengths after preemption with prefix hits (cases 23 and 30)."""
    shared = prompt_of(9)
    prompts = [shared + prompt_of(3 + index, 90 * index) for index in range(4)]
    params = replace(PARAMS, max_tokens=24)
    records = answers(checkpoints, prompts, params, compile_mode)
    setup = Setup(k=k, block_size=4, num_blocks=19, budget=budget, compile=compile_mode)
    proposer = scripted("exactly", records, accept=k // 2) if k else None
    harness = Harness(setup.start(checkpoints.get(), proposer))
    match_prefix, resumed_with = harness.engine.kv.match_prefix, []

    def watched(request: Request) -> int:
        num_cached = match_prefix(request)
        if request.metrics.num_preemptions:
            resumed_with.append(num_cached)
        return num_cached

    harness.engine.kv.match_prefix = watched  # type: ignore[method-assign]
    for index, prompt in enumerate(prompts):
        harness.add(str(index), prompt, params)
    harness.drain()
    for index, prompt in enumerate(prompts):
        assert [*prompt, *harness.stream(str(index))] == records[str(index)]
    assert harness.engine.stats().num_preemptions == len(resumed_with) > 0
    assert max(resumed_with) > 0, "nothing was found in the cache on resumption"
