"""Aborts at every moment of a request's life, beside requests that must not notice (case 26)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from graphengine.engine import Engine
from graphengine.sampling.params import SamplingParams
from proposers.base import Commit, Draft, ProposeInputs
from proposers.mock import OracleProposer
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Setup
from tests.tiny import VOCAB_SIZE

PARAMS = SamplingParams(max_tokens=15, ignore_eos=True)
PROMPTS = {"a": (4, 5, 6), "victim": tuple(range(30, 52)), "c": (7,) * 9}
SETUP = Setup(k=3, budget=16)


class Meddler(OracleProposer):
    """An oracle that does something else first, at its n-th call."""

    def __init__(self, records: dict[str, list[int]]) -> None:
        super().__init__(vocab_size=VOCAB_SIZE, records=records)
        self.in_propose: dict[int, Callable[[], object]] = {}
        self.in_commit: dict[int, Callable[[], object]] = {}

    def propose(self, inputs: ProposeInputs) -> Draft:
        self.in_propose.get(self.num_proposals, lambda: None)()
        return super().propose(inputs)

    def on_commit(self, commit: Commit) -> None:
        self.in_commit.get(len(self.commits), lambda: None)()
        super().on_commit(commit)


@pytest.fixture(scope="module")
def records(checkpoints: Checkpoints) -> dict[str, list[int]]:
    harness = Harness(Setup().start(checkpoints.get()))
    for request_id, prompt in PROMPTS.items():
        harness.add(request_id, prompt, PARAMS)
    harness.drain()
    return {key: [*prompt, *harness.stream(key)] for key, prompt in PROMPTS.items()}


@pytest.fixture
def harness(checkpoints: Checkpoints, records: dict[str, list[int]]) -> Harness:
    harness = Harness(SETUP.start(checkpoints.get(), Meddler(records)))
    for request_id, prompt in PROMPTS.items():
        harness.add(request_id, prompt, PARAMS)
    return harness


def finish(harness: Harness, records: dict[str, list[int]]) -> list[int]:
    """Run to the end; the others have their whole streams; returns what the victim emitted."""
    harness.drain()
    for other in ("a", "c"):
        assert [*PROMPTS[other], *harness.stream(other)] == records[other]
        assert harness.reason(other) == "length"
    assert harness.reason("victim") == "abort"
    stream = harness.stream("victim")
    assert [*PROMPTS["victim"], *stream] == records["victim"][
        : len(PROMPTS["victim"]) + len(stream)
    ]
    stats = harness.engine.stats()
    assert stats.num_emitted_tokens == sum(r.num_output_tokens for r in harness.requests.values())
    assert stats.num_draft_tokens == sum(
        r.metrics.num_draft_tokens for r in harness.requests.values()
    )
    assert "victim" in harness.engine.proposer.forgotten  # type: ignore[union-attr]
    return stream


def test_before_prefill(harness: Harness, records: dict[str, list[int]]) -> None:
    """A request that still gets blocks, or a token, although it left the queue."""
    assert harness.abort("victim")
    assert finish(harness, records) == []
    assert harness.requests["victim"].metrics.first_scheduled_time is None


def test_between_chunks(harness: Harness, records: dict[str, list[int]]) -> None:
    """Blocks of a half prefilled prompt that are not given back."""
    harness.step()
    victim = harness.requests["victim"]
    assert 0 < victim.kv_len < victim.num_tokens - 1
    assert harness.abort("victim")
    assert len(victim.block_table) == 0
    assert finish(harness, records) == []


@pytest.mark.parametrize("call", range(5))
def test_after_the_draft_before_verify(
    call: int, harness: Harness, records: dict[str, list[int]]
) -> None:
    """A step whose batch is not the batch that it drafted for."""
    meddler = harness.engine.proposer
    assert isinstance(meddler, Meddler)
    meddler.in_propose[call] = lambda: harness.engine.abort("victim")
    finish(harness, records)


def test_everybody_aborted_inside_propose(harness: Harness) -> None:
    """A verify of no request at all."""
    meddler = harness.engine.proposer
    assert isinstance(meddler, Meddler)

    def abort_all() -> None:
        assert all(harness.engine.abort(request_id) for request_id in PROMPTS)

    meddler.in_propose[1] = abort_all
    harness.drain()
    assert {request_id: harness.reason(request_id) for request_id in PROMPTS} == dict.fromkeys(
        PROMPTS, "abort"
    )


@pytest.mark.parametrize("call", range(1, 4))
def test_after_verify_before_delivery(
    call: int, harness: Harness, records: dict[str, list[int]]
) -> None:
    """A result delivered twice or to nobody: aborted by the proposer as it learns of the commit."""
    meddler = harness.engine.proposer
    assert isinstance(meddler, Meddler)

    def replace_victim() -> None:
        harness.engine.abort("victim")

    meddler.in_commit[call] = replace_victim
    finish(harness, records)


def test_twice_unknown_and_finished(harness: Harness, records: dict[str, list[int]]) -> None:
    """An abort that is not there that frees something or raises."""
    harness.step()
    assert harness.abort("victim")
    assert not harness.abort("victim")
    assert not harness.abort("nobody")
    finish(harness, records)
    assert not harness.abort("a")
    assert harness.engine.kv.stats().num_used == 0


def test_an_id_may_come_back(harness: Harness, records: dict[str, list[int]]) -> None:
    """An id that stays taken, or a new request that inherits the old one's tokens."""
    harness.step()
    harness.abort("victim")
    finish(harness, records)
    del harness.outputs["victim"]
    harness.add("victim", PROMPTS["victim"], PARAMS)
    harness.drain()
    assert [*PROMPTS["victim"], *harness.stream("victim")] == records["victim"]


def test_the_last_output_comes_with_the_next_step(checkpoints: Checkpoints) -> None:
    """An abort of the only request that its caller never hears of."""
    engine: Engine = SETUP.start(checkpoints.get())
    engine.add_request("a", [1], PARAMS)
    engine.step()
    engine.abort("a")
    assert engine.has_unfinished_requests()  # so that "while unfinished: step" hears of it
    (output,) = engine.step()
    assert output.finished
    assert output.outputs[0].finish_reason == "abort"
    assert not engine.has_unfinished_requests()
    assert engine.step() == []
