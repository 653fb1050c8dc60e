"""Proposers that raise as they are told who is gone, and that change what they may only read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from graphengine.llm import LLM
from graphengine.sampling.params import SamplingParams
from proposers.base import Draft, ProposeInputs
from proposers.mock import JunkProposer
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Setup
from tests.tiny import VOCAB_SIZE

PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
SETUP = Setup(k=2, compile="off")


class Forgetful(JunkProposer):
    """Cannot forget anybody."""

    def __init__(self) -> None:
        super().__init__(vocab_size=VOCAB_SIZE)

    def forget(self, request_ids: Sequence[str]) -> None:
        super().forget(request_ids)
        raise RuntimeError("cannot forget")


@pytest.fixture
def llm(checkpoints: Checkpoints) -> Iterator[LLM]:
    config = SETUP.config()
    llm = LLM(
        checkpoints.get(),
        max_model_len=64,
        speculative=config.speculative,
        capture=config.capture,
        cache=config.cache,
    )
    llm.engine.proposer = Forgetful()
    yield llm
    llm.engine.proposer = None
    llm.close()


def test_a_call_that_fails_leaves_nothing_queued(llm: LLM) -> None:
    """Requests of a failed call that run on, and outputs of others that go down with it."""
    llm.engine.add_request("mine", [5, 6, 7], PARAMS)
    with pytest.raises(RuntimeError, match="cannot forget"):
        # The first to finish is forgotten, which raises; dropping the others raises once more.
        llm.generate([[1, 2], [3], [4]], [SamplingParams(max_tokens=n) for n in (3, 16, 16)])
    assert [request.request_id for request in llm.engine.scheduler.running] == ["mine"]
    llm.engine.proposer = None
    tokens = 0
    while llm.engine.has_unfinished_requests():
        for output in llm.engine.step():
            assert output.request_id == "mine"
            tokens += output.num_new_tokens
    assert tokens == 20


def test_close_frees_everything_all_the_same(llm: LLM) -> None:
    """Weights and graphs that stay because the proposer could not forget a request."""
    for request_id in ("a", "b"):
        llm.engine.add_request(request_id, [1, 2, 3], PARAMS)
    llm.engine.step()
    proposer = llm.engine.proposer
    assert isinstance(proposer, Forgetful)
    with pytest.raises(RuntimeError, match="cannot forget"):
        llm.close()
    assert proposer.forgotten == ["a", "b"]
    assert llm.engine.proposer is None
    assert not hasattr(llm.engine, "runner")
    assert not llm.engine.has_unfinished_requests()
    llm.close()


def test_abort_drops_the_request_all_the_same(llm: LLM) -> None:
    """A last output that is never delivered."""
    llm.engine.add_request("a", [1, 2, 3], PARAMS)
    llm.engine.step()
    with pytest.raises(RuntimeError, match="cannot forget"):
        llm.engine.abort("a")
    (output,) = llm.engine.step()
    assert output.outputs[0].finish_reason == "abort"
    assert llm.stats().kv_blocks_used == 0


class Greedy(JunkProposer):
    """Raises its own allowance once, and drafts that many tokens."""

    done = False

    def propose(self, inputs: ProposeInputs) -> Draft:
        if self.done:
            return super().propose(inputs)
        self.done = True
        inputs.num_draft_tokens[:] = inputs.k
        full = np.zeros((inputs.num_reqs, inputs.k), dtype=np.int32)
        return Draft(token_ids=full, num_draft_tokens=inputs.num_draft_tokens.copy())


def test_an_allowance_is_not_the_proposers_to_raise(checkpoints: Checkpoints) -> None:
    """Drafts without KV rows: a step that is committed for some requests and lost for others."""
    expected = Harness(SETUP.start(checkpoints.get()))
    harness = Harness(SETUP.start(checkpoints.get(), Greedy(vocab_size=VOCAB_SIZE)))
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (20, 2)]
    for one in (expected, harness):
        for request_id, each in zip("ab", params, strict=True):
            one.add(request_id, [7], each)  # one token: decodes in the first step
    expected.drain()
    with pytest.raises(ValueError, match="read-only"):
        harness.step()
    harness.audit_between_steps()
    harness.drain()
    for request_id in "ab":
        assert harness.stream(request_id) == expected.stream(request_id)
