"""Stand-ins of model-carrying proposers: they serve without a checkpoint, and see broken promises.

An engine whose drafts, rows and hidden states are checked by the stand-in itself, through joins,
aborts, preemption, prefix hits, chunks and pauses; then each promise broken on purpose.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from graphengine.sampling.params import SamplingParams
from proposers import ProposeInputs
from proposers.base import CacheRows
from proposers.mock_models import MockModelProposer
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.harness import Harness, Job
from tests.graphengine.engine.setups import Setup

KINDS = {
    "draft-model": ("mock-draft-model", {}),
    "eagle": ("mock-eagle", {}),
    "mtp": ("mock-mtp", {}),
    "mtp-3": ("mock-mtp", {"num_layers": 3}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
MAX_TOKENS = 28
SIZE = 4  # of a block
Records = dict[str, list[int]]


def make_jobs() -> list[Job]:
    """Joins, leaves and aborts; prompts around blocks of 4 that share their beginnings."""
    draw = random.Random(5)
    stem, jobs, now = tuple(draw.randrange(256) for _ in range(24)), [], 0
    for index in range(16):
        length, now = draw.choice((1, 2, 3, 4, 5, 7, 8, 12, 17)), now + draw.choice((0, 0, 0, 1))
        shared = draw.randint(0, length)
        tail = tuple(draw.randrange(256) for _ in range(length - shared))
        jobs.append(
            Job(
                request_id=f"job-{index}",
                prompt=stem[:shared] + tail,
                params=SamplingParams(max_tokens=draw.randint(4, MAX_TOKENS), ignore_eos=True),
                arrives=now,
                aborts=now + draw.randrange(1, 9) if index % 8 == 5 else None,
            )
        )
    return jobs


JOBS = make_jobs()


@pytest.fixture(scope="module")
def records(checkpoints: Checkpoints) -> Records:
    """What the target answers to the prompts of JOBS, prompts included."""
    harness = Harness(Setup(max_num_seqs=16, prefix=False).start(checkpoints.get()))
    longest = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    for job in JOBS:
        harness.add(job.request_id, job.prompt, longest)
    harness.drain()
    harness.engine.close()
    return {job.request_id: [*job.prompt, *harness.stream(job.request_id)] for job in JOBS}


def start(
    checkpoints: Checkpoints, records: Records, kind: str, setup: Setup, **options: Any
) -> Harness:
    name, own = KINDS[kind]
    given = {"records": records, **own, **options}
    return Harness(setup.start(checkpoints.get(), method=name, **given))


def check_streams(harness: Harness, records: Records) -> None:
    """What came out is what was recorded, as far as it came."""
    for name, request in harness.requests.items():
        assert request.token_ids == records[name][: request.num_tokens]


@pytest.mark.parametrize(
    ("kind", "accepted"),
    [("draft-model", None), ("draft-model", 1), ("eagle", 0), ("mtp", 2), ("mtp-3", 1)],
)
def test_a_busy_engine_keeps_its_promises(
    kind: str, accepted: int | None, checkpoints: Checkpoints, records: Records
) -> None:
    """Guards rows, rollback and catch-up where none, some or all drafts are accepted."""
    setup = Setup(k=3, max_num_seqs=5, num_blocks=16, budget=20, debug=True)
    harness = start(checkpoints, records, kind, setup, num_accepted=accepted)
    harness.run(JOBS)
    check_streams(harness, records)
    stats = harness.engine.stats()
    assert stats.num_preemptions > 0
    assert max(one.metrics.num_cached_tokens for one in harness.requests.values()) > 0
    assert stats.num_draft_tokens > 60
    if accepted is None:
        assert stats.num_accepted_tokens == stats.num_draft_tokens
    if accepted == 0:
        assert stats.num_accepted_tokens == 0
    drafted = sum(n for key, n in stats.replays.items() if key.endswith(":draft"))
    assert drafted > 10
    harness.engine.close()


@every_kind
def test_pauses_are_caught_up(kind: str, checkpoints: Checkpoints, records: Records) -> None:
    """Guards steps without drafts, whose rows are filled when drafting goes on (case 37)."""
    setup = Setup(k=3, max_num_seqs=16, num_reqs=(1, 6))
    harness = start(checkpoints, records, kind, setup)
    for job in JOBS:
        harness.add(job.request_id, job.prompt, job.params)
    while harness.engine.has_unfinished_requests():
        harness.engine.draft_limit = (3, 3, 0, 0, 0, 3, 1, 2)[harness.num_steps % 8]
        harness.step()
    check_streams(harness, records)
    stats = harness.engine.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 100
    harness.engine.close()


@pytest.mark.parametrize(
    ("kind", "sampling"),
    [("draft-model", "coupled"), ("eagle", "probabilistic"), ("mtp-3", "probabilistic")],
)
def test_recordings_are_certain_however_drafts_are_drawn(
    kind: str, sampling: str, checkpoints: Checkpoints, records: Records
) -> None:
    """Guards the distribution that comes with a recorded draft: all of it on that token."""
    setup = Setup(k=3, verification="rejection" if sampling == "probabilistic" else "exact")
    harness = start(checkpoints, records, kind, setup, draft_sampling=sampling)
    for job in JOBS[:6]:
        harness.add(job.request_id, job.prompt, job.params)
    harness.drain()
    check_streams(harness, records)
    stats = harness.engine.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 20
    harness.engine.close()


def test_a_stand_in_can_be_overridden(checkpoints: Checkpoints, records: Records) -> None:
    """Guards rows behind drafts that were not the model's, for a proposer that counts its rows."""
    setup = Setup(k=3, max_num_seqs=6)
    options = {"override": "ngram", "override_min_match": 2, "self_check": "off"}
    for kind in ("draft-model", "mtp-3"):
        harness = start(checkpoints, records, kind, setup, **options)
        for job in JOBS[:12]:
            harness.add(job.request_id, job.prompt, job.params)
        harness.drain()
        check_streams(harness, records)
        harness.engine.close()


Break = Callable[[ProposeInputs, CacheRows, MockModelProposer], CacheRows]


def one_row_too_many(inputs: ProposeInputs, cache: CacheRows, _: MockModelProposer) -> CacheRows:
    """Kept drafts are valid only where they were accepted; nobody has filled the last row."""
    most = np.array([len(tokens) - 1 for tokens in inputs.token_ids], dtype=np.int32)
    return replace(cache, draft_kv_lens=np.maximum(cache.draft_kv_lens, most))


def beyond_the_target(inputs: ProposeInputs, cache: CacheRows, _: MockModelProposer) -> CacheRows:
    lengths = np.array([len(tokens) for tokens in inputs.token_ids], dtype=np.int32)
    return replace(cache, draft_kv_lens=lengths)


def blocks_of_another(inputs: ProposeInputs, cache: CacheRows, _: MockModelProposer) -> CacheRows:
    return replace(cache, block_table=np.roll(cache.block_table, 1, axis=0))


def blocks_shared(inputs: ProposeInputs, cache: CacheRows, _: MockModelProposer) -> CacheRows:
    table = cache.block_table.copy()
    for row, tokens in enumerate(inputs.token_ids[1:], start=1):
        last = (len(tokens) - 1) // SIZE
        table[row, last] = table[0, 0]
    return replace(cache, block_table=table)


def no_block_for_drafts(inputs: ProposeInputs, cache: CacheRows, _: MockModelProposer) -> CacheRows:
    table = cache.block_table.copy()
    for row, tokens in enumerate(inputs.token_ids):
        table[row, (len(tokens) + inputs.num_draft_tokens[row] - 1) // SIZE :] = 0
    return replace(cache, block_table=table)


def kv_is_gone(inputs: ProposeInputs, cache: CacheRows, proposer: MockModelProposer) -> CacheRows:
    for layer in proposer.runtime.kv_caches:
        layer[cache.block_table[0, 0]] = float("nan")
    return cache


@pytest.mark.parametrize(
    ("breach", "message"),
    [
        (one_row_too_many, "slot .* is said to hold draft KV of these tokens, and does not"),
        (beyond_the_target, "draft rows and .* target rows"),
        (blocks_of_another, "slot 0 is said to hold draft KV"),
        (blocks_shared, "are another request's too"),
        (no_block_for_drafts, "rows reserved, block table"),
        (kv_is_gone, "draft KV of a valid row is no number"),
    ],
)
def test_a_broken_promise_is_seen(
    breach: Break, message: str, checkpoints: Checkpoints, records: Records
) -> None:
    """Guards the checks themselves: an engine that slips is found by its own stand-in."""
    harness = start(checkpoints, records, "mtp-3", Setup(k=3), num_accepted=1)
    proposer: Any = harness.engine.proposer
    for job in (job for job in JOBS if len(job.prompt) > 4):
        harness.add(job.request_id, job.prompt, job.params)
    for _ in range(3):
        harness.step()
    propose = proposer.propose

    def broken(inputs: ProposeInputs) -> Any:
        assert inputs.cache is not None
        return propose(replace(inputs, cache=breach(inputs, inputs.cache, proposer)))

    proposer.propose = broken
    with pytest.raises(AssertionError, match=message):
        harness.step()
    harness.engine.close()


@pytest.mark.parametrize("when", ["prefill", "propose"])
def test_a_missing_hidden_state_is_seen(
    when: str, checkpoints: Checkpoints, records: Records
) -> None:
    """Guards against features of slots that the target has not filled (case 32)."""
    harness = start(checkpoints, records, "eagle", Setup(k=3, budget=8))
    job = next(job for job in JOBS if len(job.prompt) > 8)
    harness.add(job.request_id, job.prompt, job.params)
    states = harness.engine.runner.hidden_states
    assert states is not None
    for _ in range(1 if when == "prefill" else 4):
        harness.step()
    drafting: Any = harness.engine.drafting
    call = getattr(drafting, when)

    def without(given: Any) -> Any:
        states.storage.fill_(float("nan"))
        return call(given)

    setattr(drafting, when, without)
    with pytest.raises(AssertionError, match="a hidden state of the target is missing"):
        harness.step()
    harness.engine.close()


@every_kind
def test_a_chain_that_reads_garbage_is_seen(
    kind: str, checkpoints: Checkpoints, records: Records
) -> None:
    """Guards the last of the checks: NaN in a row that a chain attends to comes out of it."""
    harness = start(checkpoints, records, kind, Setup(k=3))
    proposer: Any = harness.engine.proposer
    job = max(JOBS, key=lambda job: job.params.max_tokens or 0)
    harness.add(job.request_id, job.prompt, job.params)
    for _ in range(3):
        harness.step()
    proposer._mirror.check = lambda *given, **named: [
        layer.fill_(float("nan")) for layer in proposer.runtime.kv_caches
    ]
    with pytest.raises(AssertionError, match="a row has read what is no number"):
        harness.step()
    harness.engine.close()


def test_options_are_checked(checkpoints: Checkpoints, records: Records) -> None:
    """Guards against a test set-up that silently runs something else."""
    setup = Setup(k=3)
    for options, message in (
        ({"num_accepted": 4}, "mock-eagle.*num_accepted=4: expected an integer from 0 to 3"),
        ({"num_layers": 2}, "no option 'num_layers'"),
    ):
        with pytest.raises(ValueError, match=message):
            start(checkpoints, records, "eagle", setup, **options)
    harness = start(checkpoints, {}, "eagle", setup)
    harness.add("unheard-of", [1])
    with pytest.raises(ValueError, match="no recording of request 'unheard-of'"):
        harness.step()
    harness.engine.close()
