"""Closing, failing proposers, outputs: what an engine owes its caller when things end or break."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np
import pytest

from graphengine.engine import Engine
from graphengine.llm import LLM
from graphengine.sampling.params import SamplingParams
from proposers.base import Commit, Draft, ProposeInputs
from proposers.mock import EmptyProposer, JunkProposer
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Compile, Graph, Setup, with_torch_ops
from tests.tiny import VOCAB_SIZE

SETUP = Setup(k=3)
PROMPTS = {"a": [1, 2, 3, 4, 5], "b": [9, 8, 7], "c": [6] * 12}
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


def answers(checkpoints: Checkpoints) -> dict[str, list[int]]:
    harness = Harness(Setup().start(checkpoints.get()))
    for request_id, prompt in PROMPTS.items():
        harness.add(request_id, prompt, PARAMS)
    harness.drain()
    return {request_id: harness.stream(request_id) for request_id in PROMPTS}


class FailingProposer(JunkProposer):
    """Fails in one call of its life, in the way that it is told."""

    def __init__(self, where: str, when: int) -> None:
        super().__init__(vocab_size=VOCAB_SIZE)
        self.where, self.when = where, when
        self.num_calls = 0

    def _is_due(self, where: str) -> bool:
        if where != self.where:
            return False
        self.num_calls += 1
        return self.num_calls == self.when

    def propose(self, inputs: ProposeInputs) -> Draft:
        if self._is_due("propose"):
            raise RuntimeError("the proposer broke")
        draft = super().propose(inputs)
        if self._is_due("id"):
            draft.token_ids[0, 0] = VOCAB_SIZE
        if self._is_due("length"):
            draft.num_draft_tokens[:] = inputs.num_draft_tokens + 1
        if self._is_due("shape"):
            return Draft(token_ids=draft.token_ids[:, :-1], num_draft_tokens=np.zeros(1, np.int32))
        return draft

    def on_commit(self, commit: Commit) -> None:
        if self._is_due("on_commit"):
            raise RuntimeError("the proposer broke")


@pytest.mark.parametrize("when", [1, 2, 5, 12])
@pytest.mark.parametrize("where", ["propose", "id", "length", "shape", "on_commit"])
def test_a_failing_proposer_leaves_the_engine_consistent(
    where: str, when: int, checkpoints: Checkpoints
) -> None:
    """Tokens lost, doubled or never delivered after a step that a proposer broke."""
    proposer = FailingProposer(where, when)
    harness = Harness(SETUP.start(checkpoints.get(), proposer))
    for request_id, prompt in PROMPTS.items():
        harness.add(request_id, prompt, PARAMS)
    expected = RuntimeError if where in ("propose", "on_commit") else AssertionError
    failures = 0
    while harness.engine.has_unfinished_requests() or len(harness.outputs) < len(PROMPTS):
        try:
            harness.step()
        except expected:
            failures += 1
            harness.audit_between_steps()
    assert failures == (1 if proposer.num_calls >= when else 0)
    if when < 12:
        assert failures == 1
    for output in harness.engine.step():  # what a failing last step had left
        harness._collect(output)
    harness.check_drained()
    assert {request_id: harness.stream(request_id) for request_id in PROMPTS} == answers(
        checkpoints
    )
    assert sorted(set(proposer.forgotten)) == sorted(PROMPTS)


def test_closing_twice_and_use_after(checkpoints: Checkpoints) -> None:
    """An obscure error, or none, where a closed engine is used."""
    engine = SETUP.start(checkpoints.get())
    engine.add_request("a", [1, 2], PARAMS)
    engine.step()
    engine.close()
    engine.close()
    uses: list[Callable[[], object]] = [
        engine.step,
        engine.stats,
        engine.capture_report,
        engine.reset_prefix_cache,
        lambda: engine.add_request("b", [1, 2]),
        lambda: engine.abort("a"),
        lambda: engine.discard(["a"]),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match="closed"):
            use()
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("graph", ["tape", "compiled", "eager"])
@with_torch_ops
def test_leaving_the_context_frees_memory(
    graph: Graph, compile_mode: Compile, checkpoints: Checkpoints
) -> None:
    """Weights, KV or buffers that live on, held by a graph, a view or a cycle."""
    config = Setup(graph=graph, compile=compile_mode, k=2).config()
    with LLM(checkpoints.get(), **llm_fields(config)) as llm:
        llm.generate([[1, 2, 3]], PARAMS)
        runner = llm.engine.runner
        held = [
            weakref.ref(runner.decoder.weights.embed),
            weakref.ref(runner.decoder.kv_caches[0]),
            weakref.ref(runner.buffers.whole("logits")),
        ]
        del runner
    assert [ref() is None for ref in held] == [True] * 3


def llm_fields(config: object) -> dict[str, object]:
    """The fields of an EngineConfig that LLM takes as they are."""
    names = ("dtype", "max_model_len", "max_num_seqs", "speculative", "capture", "cache")
    return {name: getattr(config, name) for name in names}


def test_an_output_is_a_snapshot(checkpoints: Checkpoints) -> None:
    """An output that changes after it was handed out."""
    engine = SETUP.start(checkpoints.get())
    engine.add_request("a", [7], PARAMS)  # one token needs no prefill
    (first,) = engine.step()
    metrics, answer = first.metrics.num_steps, list(first.outputs[0].token_ids)
    while engine.has_unfinished_requests():
        engine.step()
    assert first.metrics.num_steps == metrics == 1
    assert first.outputs[0].token_ids == answer
    assert not first.finished


def test_metrics_of_an_output(checkpoints: Checkpoints) -> None:
    """Times out of order, or counts that are not those of the request."""
    harness = Harness(SETUP.start(checkpoints.get(), EmptyProposer(vocab_size=VOCAB_SIZE)))
    harness.add("a", PROMPTS["a"], PARAMS)
    harness.drain()
    metrics = harness.outputs["a"].metrics
    times = (
        metrics.arrival_time,
        metrics.first_scheduled_time,
        metrics.first_token_time,
        metrics.finished_time,
    )
    assert all(time is not None for time in times)
    assert sorted(times) == list(times)
    assert metrics.num_steps == PARAMS.max_tokens
    assert metrics.num_draft_tokens == metrics.num_accepted_tokens == metrics.num_drafts == 0
    assert metrics.num_preemptions == metrics.num_cached_tokens == 0


def test_draft_limit_may_change_between_steps(checkpoints: Checkpoints) -> None:
    """A stream that changes when drafting pauses and goes on (case 37, host side)."""
    harness = Harness(SETUP.start(checkpoints.get(), JunkProposer(vocab_size=VOCAB_SIZE)))
    for request_id, prompt in PROMPTS.items():
        harness.add(request_id, prompt, PARAMS)
    widths = []
    while harness.engine.has_unfinished_requests():
        harness.engine.draft_limit = (3, 0, 0, 1, 2)[harness.num_steps % 5]
        before = harness.engine.stats().num_draft_tokens
        harness.step()
        widths.append(harness.engine.stats().num_draft_tokens > before)
    assert set(widths) == {True, False}, "the limit never changed what was drafted"
    assert {request_id: harness.stream(request_id) for request_id in PROMPTS} == answers(
        checkpoints
    )
    for bad in (-1, 4, 1.0, True):
        with pytest.raises(ValueError, match="draft_limit"):
            harness.engine.draft_limit = bad  # type: ignore[assignment]


def test_prompts_of_text(checkpoints: Checkpoints) -> None:
    """Text that is not the decoding of the tokens, or comes in pieces that do not add up."""
    engine: Engine = SETUP.start(checkpoints.get())
    engine.add_request("a", "the thin thing", PARAMS)
    pieces, last = [], None
    while engine.has_unfinished_requests():
        for output in engine.step():
            pieces.append(output.new_text)
            last = output
    assert last is not None
    assert engine.tokenizer is not None
    assert "".join(pieces) == last.outputs[0].text
    assert last.prompt_token_ids == engine.tokenizer.encode("the thin thing")
