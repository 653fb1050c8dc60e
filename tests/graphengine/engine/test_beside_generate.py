"""`LLM.generate` beside requests of the engine under it, and salts of the prefix cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from graphengine.llm import LLM
from graphengine.outputs import RequestOutput
from graphengine.sampling.params import SamplingParams
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.setups import Setup

PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)
LONGER = SamplingParams(max_tokens=25, ignore_eos=True)
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]


@pytest.fixture
def llm(checkpoints: Checkpoints) -> Iterator[LLM]:
    config = Setup(k=2).config()
    with LLM(
        checkpoints.get(),
        max_model_len=64,
        speculative=config.speculative,
        capture=config.capture,
        cache=config.cache,
    ) as llm:
        yield llm


def drain(llm: LLM) -> list[RequestOutput]:
    outputs = []
    while llm.engine.has_unfinished_requests():
        outputs += llm.engine.step()
    return outputs


@pytest.mark.parametrize("params", [PARAMS, LONGER])
def test_outputs_of_other_requests_are_delivered_in_order(llm: LLM, params: SamplingParams) -> None:
    """Answers that are lost, whole or in part, because generate stepped the engine meanwhile."""
    expected = llm.generate([PROMPT], params)[0].outputs[0].token_ids
    llm.engine.add_request("mine", PROMPT, params)
    llm.engine.add_request("dropped", PROMPT, params)
    first = llm.engine.step()
    llm.engine.abort("dropped")
    (answer,) = llm.generate([[1, 2, 3]], PARAMS)
    assert len(answer.outputs[0].token_ids) == 10
    mine = [out for out in [*first, *drain(llm)] if out.request_id == "mine"]
    assert mine[-1].finished
    assert [out.finished for out in mine].count(True) == 1
    counts = [len(out.outputs[0].token_ids) for out in mine]
    assert counts == sorted(counts)
    assert sum(out.num_new_tokens for out in mine) == counts[-1] == params.max_tokens
    assert mine[-1].outputs[0].token_ids == expected
    assert not llm.engine.has_unfinished_requests()


def test_outputs_survive_a_generate_that_fails(llm: LLM) -> None:
    """Answers of others that go down with a call that was interrupted."""
    llm.engine.add_request("mine", PROMPT, PARAMS)
    step, calls = llm.engine.step, []

    def interrupted() -> list[RequestOutput]:
        calls.append(0)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return step()

    llm.engine.step = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2, 3]], LONGER)
    outputs = drain(llm)
    assert {out.request_id for out in outputs} == {"mine"}
    assert sum(out.num_new_tokens for out in outputs) == 10


def test_a_call_takes_no_id_of_others(llm: LLM) -> None:
    """A call refused, or somebody's request dropped, because both had the same id."""
    (first,) = llm.generate([PROMPT], PARAMS)
    llm.engine.add_request(first.request_id, PROMPT, PARAMS)
    (again,) = llm.generate([PROMPT], PARAMS)
    assert again.outputs == first.outputs
    assert drain(llm)[-1].request_id == first.request_id


def test_a_refused_prompt_is_named_by_its_place(llm: LLM) -> None:
    """A batch of a thousand, one of which is empty."""
    with pytest.raises(ValueError, match=r"'prompt-2-.*the prompt is empty"):
        llm.generate([PROMPT, PROMPT, []], PARAMS)
    assert not llm.engine.has_unfinished_requests()


def test_salts_share_no_blocks(llm: LLM) -> None:
    """A cached prefix that another user's request is answered faster with."""

    def cached(salt: str | None) -> int:
        (output,) = llm.generate([PROMPT], PARAMS, cache_salt=salt)
        tokens.append(output.outputs[0].token_ids)
        return output.metrics.num_cached_tokens

    tokens: list[list[int]] = []
    assert [cached(None), cached("a"), cached("b")] == [0, 0, 0]
    assert [cached(None), cached("a"), cached("b")] == [8, 8, 8]
    assert all(answer == tokens[0] for answer in tokens)
    for bad in ("", 7):
        with pytest.raises(ValueError, match=f"cache_salt={bad!r}"):
            llm.generate([PROMPT], PARAMS, cache_salt=bad)  # type: ignore[arg-type]
        assert not llm.engine.has_unfinished_requests()


def test_a_salt_outlives_preemption(checkpoints: Checkpoints) -> None:
    """A preempted request that comes back with the blocks of another salt."""
    engine = Setup(num_blocks=14, max_num_seqs=2).start(checkpoints.get())
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    for salt in ("a", "b"):
        engine.add_request(salt, PROMPT, params, cache_salt=salt)
    last: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        running = [set(r.block_table.block_ids) for r in engine.scheduler.running]
        assert len(running) < 2 or not running[0] & running[1]
        last.update((out.request_id, out) for out in engine.step())
    assert sum(out.metrics.num_preemptions for out in last.values()) > 0
    assert last["a"].outputs[0].token_ids == last["b"].outputs[0].token_ids
