"""On and off give the same streams: any proposer, k, batch, pool, chunking, cache and launcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from profiles.tiny_drafts import write_draft
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Setup, scripted
from tests.parity.pairwise import pairs_of, pairwise
from tests.parity.workload import (
    MAX_MODEL_LEN,
    Answer,
    answer_off,
    check_identity,
    make_jobs,
    off_setup,
)

pytestmark = pytest.mark.parity

AnswersOf = Callable[[str, str, str], list[Answer]]

FACTORS: dict[str, tuple[Any, ...]] = {
    "proposer": (
        *("ngram", "suffix", "successor", "draft_model", "eagle", "mtp"),
        *("oracle", "junk", "exactly", "ragged", "empty"),
    ),
    # (compile, k, max_num_seqs): few of them through torch.compile, which takes seconds for each
    "shape": (
        ("native", 3, 5),
        ("native", 6, 16),
        ("off", 1, 16),
        ("off", 2, 1),
        ("off", 9, 2),
        ("off", 6, 5),
    ),
    "block_size": (1, 4, 16),
    "pool": ("tiny", "roomy"),
    "prefill": ("chunked-small", "chunked", "whole"),
    "prefix": (True, False),
    "graph": ("tape", "compiled", "eager"),
    "dtype": ("float32", "bfloat16"),
    "checkpoint": ("llama", "loopy"),
}
ROWS = pairwise(FACTORS)
HEADS = {"llama": "eagle3", "loopy": "rough-loopy"}


@pytest.fixture(scope="module")
def answers_of(checkpoints: Checkpoints) -> AnswersOf:
    """Off answers by (checkpoint, dtype, compile mode), taken once."""

    @cache
    def answers(name: str, dtype: str, compile_mode: str) -> list[Answer]:
        return answer_off(checkpoints.get(name), off_setup(dtype, compile_mode))

    return answers


def make_setup(row: dict[str, Any]) -> Setup:
    """The engine of one combination. A tiny pool holds one full context and a few blocks more."""
    per_context = -(-MAX_MODEL_LEN // row["block_size"])
    tiny = per_context + 1 + max(2, per_context // 3)
    compile_mode, k, max_num_seqs = row["shape"]
    return Setup(
        k=k,
        dtype=row["dtype"],
        graph=row["graph"],
        compile=compile_mode,
        block_size=row["block_size"],
        num_blocks=tiny if row["pool"] == "tiny" else None,
        max_num_seqs=max_num_seqs,
        num_reqs=(1, 4) if max_num_seqs > 4 else None,  # coarse, so that there is padding
        max_model_len=MAX_MODEL_LEN,
        budget=max(max_num_seqs, k + 1, 7) if row["prefill"] == "chunked-small" else None,
        chunked=row["prefill"] != "whole",
        prefix=row["prefix"],
    )


def draft_of(method: str, name: str, checkpoints: Checkpoints) -> Path:
    """A draft's checkpoint for the named target."""
    if method == "draft_model":
        return checkpoints.get("loopy")  # of one of them itself
    if method == "eagle":
        return checkpoints.get(HEADS[name])
    target = checkpoints.get(name)
    folder = target.with_name(f"{name}-mtp")
    if not folder.exists():
        folder.mkdir()
        write_draft("mtp", folder, target)
    return folder


def run_row(
    row: dict[str, Any],
    checkpoints: Checkpoints,
    answers_of: AnswersOf,
    seed: int,
    *,
    min_tokens: int = 0,
) -> Harness:
    """Run one combination on a schedule of its own and compare every stream with off.

    Only prompts with at least `min_tokens` to answer take part.
    """
    name, (compile_mode, k, _) = row["checkpoint"], row["shape"]
    answers = answers_of(name, row["dtype"], compile_mode)
    answers = [answer for answer in answers if len(answer.token_ids) >= min_tokens]
    jobs, expected = make_jobs(answers, seed=seed, num_requests=12)
    records = {request_id: answer.stream for request_id, answer in expected.items()}
    setup, method = make_setup(row), row["proposer"]
    if method in ("ngram", "suffix", "successor"):
        engine = setup.start(checkpoints.get(name), method=method)
    elif method in ("draft_model", "eagle", "mtp"):
        model = draft_of(method, name, checkpoints)
        engine = setup.start(checkpoints.get(name), method=method, model=str(model))
    else:
        proposer = scripted(method, records, accept=seed % (k + 1), seed=seed)
        engine = setup.start(checkpoints.get(name), proposer)
    harness = Harness(engine)
    harness.run(jobs)
    check_identity(harness, expected)
    check_acceptance(row["proposer"], harness)
    return harness


def check_acceptance(proposer: str, harness: Harness) -> None:
    """The scripts do what they are there for: a test whose drafts never pass shows nothing."""
    stats = harness.engine.stats()
    if proposer == "oracle":
        assert stats.num_accepted_tokens > 0
        cut = sum(r.finish_reason in ("stop", "abort") for r in harness.requests.values())
        most = harness.engine.resolved.sizes.max_draft_tokens
        assert stats.num_draft_tokens - stats.num_accepted_tokens <= cut * most
    if proposer == "junk":
        assert stats.num_draft_tokens > 0
        assert stats.num_accepted_tokens == 0
    if proposer == "empty":
        assert stats.num_draft_tokens == 0
        assert {key.split(":")[0].split("x")[1] for key in stats.replays} == {"1"}


@pytest.mark.parametrize("index", range(len(ROWS)))
def test_pairwise(index: int, checkpoints: Checkpoints, answers_of: AnswersOf) -> None:
    """A stream that depends on drafts, batch mates, preemption, chunks, cache hits or launcher."""
    run_row(ROWS[index], checkpoints, answers_of, seed=index).engine.close()


def test_rows_cover_all_pairs() -> None:
    """Guards the claim of the name above."""
    wanted = {
        (first, a, second, b)
        for first, second in combinations(FACTORS, 2)
        for a in FACTORS[first]
        for b in FACTORS[second]
    }
    assert set().union(*map(pairs_of, ROWS)) == wanted


BASE = {
    "proposer": "ngram",
    "shape": ("native", 3, 5),
    "block_size": 4,
    "pool": "roomy",
    "prefill": "chunked",
    "prefix": True,
    "graph": "tape",
    "dtype": "float32",
    "checkpoint": "loopy",
}


@pytest.mark.parametrize("method", ["ngram", "suffix", "successor", "draft_model", "eagle"])
def test_drafts_are_accepted_and_change_nothing(
    method: str, checkpoints: Checkpoints, answers_of: AnswersOf
) -> None:
    """Guards the rows above of those that do draft: on text with cycles their drafts pass."""
    row = BASE | {"proposer": method}
    harness = run_row(row, checkpoints, answers_of, seed=3, min_tokens=16)
    assert harness.engine.stats().num_accepted_tokens > 20


@pytest.mark.parametrize(
    ("method", "alone"),
    [("suffix", {"shared_tree_tokens": 0}), ("successor", {"shared_pairs": 0})],
)
def test_outputs_of_others_are_drafted_and_change_nothing(
    method: str, alone: dict[str, int], checkpoints: Checkpoints, answers_of: AnswersOf
) -> None:
    """A stream that depends on what other requests have put out, through what requests share."""
    answers = [one for one in answers_of("llama", "float32", "native") if len(one.token_ids) > 8]
    setup = make_setup(BASE)
    accepted = []
    for options in ({}, alone):
        engine = setup.start(checkpoints.get("llama"), method=method, options=options)
        harness = Harness(engine)
        for turn in range(2):  # in the second one every answer has been given before
            expected = {f"{turn}-{index}": answer for index, answer in enumerate(answers)}
            for request_id, answer in expected.items():
                harness.add(request_id, answer.prompt, answer.params)
            harness.drain()
            check_identity(harness, expected)
        accepted.append(harness.engine.stats().num_accepted_tokens)
        harness.engine.close()
    assert accepted[0] > accepted[1] + 40


def test_tiny_pools_preempt(checkpoints: Checkpoints, answers_of: AnswersOf) -> None:
    """Guards the tiny-pool rows above: requests do lose their blocks and come back (case 23)."""
    for k in (1, 3, 5):
        row = BASE | {"pool": "tiny", "proposer": "oracle", "shape": ("off", k, 5)}
        harness = run_row(row, checkpoints, answers_of, seed=k, min_tokens=16)
        assert sum(r.metrics.num_preemptions for r in harness.requests.values()) > 0


@pytest.mark.parametrize("k", [3, 9])
def test_every_number_of_accepted_drafts(
    k: int, checkpoints: Checkpoints, answers_of: AnswersOf
) -> None:
    """A rollback that is off by one for some number of accepted drafts (cases 2 and 6)."""
    answers = answers_of("llama", "float32", "off")
    setup = make_setup(BASE | {"shape": ("off", k, 16), "prefix": False})
    records = {f"{j}-{i}": a.stream for j in range(k + 1) for i, a in enumerate(answers)}
    harness = Harness(setup.start(checkpoints.get("llama"), scripted("oracle", records)))
    for accept in range(k + 1):
        harness.engine.proposer = scripted("exactly", records, accept=accept)
        expected = {f"{accept}-{i}": answers[i] for i in range(4, 16)}
        for request_id, answer in expected.items():
            harness.add(request_id, answer.prompt, answer.params)
        harness.drain()
        check_identity(harness, expected)
    harness.engine.close()


def test_off_does_not_depend_on_the_schedule(
    checkpoints: Checkpoints, answers_of: AnswersOf
) -> None:
    """The reference itself would be worth nothing if plain decoding changed with batch or pool."""
    for dtype in ("float32", "bfloat16"):
        answers = answers_of("llama", dtype, "native")
        jobs, expected = make_jobs(answers, seed=11, num_requests=16)
        shape = ("native", 6, 16)
        setup = make_setup(BASE | {"pool": "tiny", "shape": shape, "dtype": dtype})
        harness = Harness(replace(setup, k=0).start(checkpoints.get("llama")))
        harness.run(jobs)
        check_identity(harness, expected)
        harness.engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FACTORS["dtype"])
@pytest.mark.parametrize("proposer", FACTORS["proposer"])
def test_product(
    proposer: str, dtype: str, checkpoints: Checkpoints, answers_of: AnswersOf
) -> None:
    """Every k x batch x block size x pool x prefill for each proposer; the rest rotates."""
    axes = [FACTORS[name] for name in ("block_size", "pool", "prefill")]
    sizes = product((1, 2, 3, 6, 9), (1, 2, 5, 16), *axes)
    for seed, (k, max_num_seqs, block_size, pool, prefill) in enumerate(sizes):
        row = {
            name: FACTORS[name][seed % len(FACTORS[name])]
            for name in ("prefix", "graph", "checkpoint")
        }
        row |= {"proposer": proposer, "dtype": dtype, "shape": ("off", k, max_num_seqs)}
        row |= {"block_size": block_size, "pool": pool, "prefill": prefill}
        run_row(row, checkpoints, answers_of, seed=seed).engine.close()
