"""Requests that are refused: a clear error, nothing queued, and everybody else unharmed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from graphengine.llm import LLM
from graphengine.outputs import RequestOutput
from graphengine.request_state import MAX_STOP_IDS
from graphengine.sampling.params import SamplingParams
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Setup
from tests.tiny import VOCAB_SIZE, make_checkpoint

PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)
MANY_STOPS = SamplingParams(stop_token_ids=tuple(range(MAX_STOP_IDS + 1)))
BAD: dict[str, tuple[str, list[int], SamplingParams, str]] = {
    "empty": ("x", [], PARAMS, "empty"),
    "negative": ("x", [1, -1], PARAMS, "negative"),
    "outside": ("x", [1, VOCAB_SIZE], PARAMS, f"{VOCAB_SIZE}.*vocabulary"),
    "too-long": ("x", [1] * 64, PARAMS, "max_model_len"),
    "id-in-use": ("a", [1, 2], PARAMS, "use another"),
    "stop-outside": ("x", [1], SamplingParams(stop_token_ids=(VOCAB_SIZE,)), "stop token"),
    "many-stops": ("x", [1], MANY_STOPS, f"at most {MAX_STOP_IDS}"),
    "pool": ("x", [1] * 40, SamplingParams(max_tokens=None), "KV blocks"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_refused_request_leaves_no_trace(name: str, checkpoints: Checkpoints) -> None:
    """Half a request that stays queued, or a neighbour that is lost with it."""
    request_id, prompt, params, message = BAD[name]
    setup = Setup(k=2, num_blocks=14)
    alone = Harness(setup.start(checkpoints.get()))
    alone.add("a", [5, 6, 7], PARAMS)
    alone.drain()
    harness = Harness(setup.start(checkpoints.get()))
    harness.add("a", [5, 6, 7], PARAMS)
    for _ in range(3):
        with pytest.raises(ValueError, match=message):
            harness.engine.add_request(request_id, prompt, params)
        harness.step()
    harness.drain()
    assert harness.stream("a") == alone.stream("a")
    assert list(harness.outputs) == ["a"]


@pytest.mark.parametrize("field", ["max_tokens", "temperature", "stop_token_ids"])
def test_bad_parameters_name_their_field(field: str) -> None:
    """A parameter that is taken and ignored; an error that names another."""
    bad: dict[str, Any] = {"max_tokens": 0, "temperature": -0.7, "stop_token_ids": (-1,)}
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: bad[field]})


def llm_fields() -> dict[str, Any]:
    config = Setup(k=2).config()
    return {name: getattr(config, name) for name in ("speculative", "capture", "cache")}


def test_generate_with_one_bad_prompt_leaves_nothing_queued(checkpoints: Checkpoints) -> None:
    """The good prompts of a refused call, served with the next one."""
    with LLM(checkpoints.get(), max_model_len=64, **llm_fields()) as llm:
        with pytest.raises(ValueError, match="vocabulary"):
            llm.generate([[1, 2], [3], [VOCAB_SIZE]], PARAMS)
        assert not llm.engine.has_unfinished_requests()
        assert llm.stats().kv_blocks_used == 0
        (output,) = llm.generate([[1, 2]], PARAMS)
        assert output.finished
        assert len(output.outputs[0].token_ids) == 10
        assert llm.stats().num_emitted_tokens == 10
        with pytest.raises(ValueError, match="SamplingParams"):
            llm.generate([[1], [2]], [PARAMS])
        assert not llm.engine.has_unfinished_requests()


def test_generate_cut_short_leaves_nothing_queued(checkpoints: Checkpoints) -> None:
    """Ctrl-C in the middle of a call, whose requests then run on in the next one."""
    with LLM(checkpoints.get(), max_model_len=64, **llm_fields()) as llm:
        step, steps = llm.engine.step, []

        def interrupted() -> Any:
            steps.append(step())
            if len(steps) == 3:
                raise KeyboardInterrupt
            return steps[-1]

        llm.engine.step = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2], [3]], PARAMS)
        assert not llm.engine.has_unfinished_requests()
        assert llm.stats().kv_blocks_used == 0
        assert len(llm.generate([[1, 2]], PARAMS)[0].outputs[0].token_ids) == 10


def test_heads_wider_than_the_kernels_workspace(tmp_path: Any) -> None:
    """Kernels that write past their buffers."""
    path = make_checkpoint(tmp_path / "wide", head_dim=264)
    with pytest.raises(ValueError, match=r"head_dim=264.*up to 256"):
        Setup().start(path)


def test_text_without_a_tokenizer(tmp_path: Any) -> None:
    """A crash inside the tokenizer that is not there."""
    engine = Setup().start(make_checkpoint(tmp_path / "bare", tokenizer=False))
    with pytest.raises(ValueError, match="tokenizer"):
        engine.add_request("a", "some text")
    engine.add_request("a", [1, 2], PARAMS)
    while engine.has_unfinished_requests():
        (output,) = engine.step() or [None]
    assert output is not None
    assert output.outputs[0].text == ""
    assert len(output.outputs[0].token_ids) == 10


WRONG_KINDS: dict[str, tuple[Any, Any, str]] = {
    "bytes": ([b"text"], PARAMS, "type bytes.*token ids"),
    "mapping": ([{1: 2}], PARAMS, "type dict.*token ids"),
    "set": ([{1, 2}], PARAMS, "type set.*token ids"),
    "none": ([[1], None], PARAMS, "type NoneType.*token ids"),
    "number": ([1.5], PARAMS, "type float.*token ids"),
    "one-prompt": ([1, 2, 3], PARAMS, "into a list of its own"),
    "one-array": (np.array([1, 2, 3]), PARAMS, "into a list of its own"),
    "fractions": (np.array([[1.0, 2.0]]), PARAMS, r"1\.0.* is not an integer"),
    "no-list": (7, PARAMS, "prompts is of type int"),
    "no-prompts": (None, PARAMS, "prompts is of type NoneType"),
    "bytes-alone": (b"text", PARAMS, "prompts is of type bytes"),
    "params": ([[1]], 5, "params=5"),
    "params-mapping": ([[1]], {"max_tokens": 3}, "expected SamplingParams"),
    "params-inside": ([[1]], [{"max_tokens": 3}], "expected SamplingParams"),
}


@pytest.fixture(scope="module")
def small_llm(checkpoints: Checkpoints) -> Iterator[LLM]:
    with LLM(checkpoints.get(), max_model_len=64, **llm_fields()) as llm:
        yield llm


@pytest.mark.parametrize("name", WRONG_KINDS)
def test_arguments_of_another_kind(name: str, small_llm: LLM) -> None:
    """Bytes served as if they were token ids; a TypeError from somewhere inside."""
    prompts, params, message = WRONG_KINDS[name]
    with pytest.raises(ValueError, match=message):
        small_llm.generate(prompts, params)
    assert not small_llm.engine.has_unfinished_requests()


def test_arrays_of_integers_are_prompts(small_llm: LLM) -> None:
    """A batch from numpy that is refused, or read as other ids."""

    def streams(outputs: list[RequestOutput]) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in outputs]

    lists = small_llm.generate([[1, 2, 3], [4, 5, 6]], PARAMS)
    for dtype in (np.int32, np.uint8, np.int64):
        arrays = small_llm.generate(np.array([[1, 2, 3], [4, 5, 6]], dtype=dtype), PARAMS)  # type: ignore[arg-type]
        assert streams(arrays) == streams(lists)
        assert arrays[1].prompt_token_ids == [4, 5, 6]


@pytest.mark.parametrize("request_id", [None, 5, ["a"]])
def test_an_id_that_is_no_string(request_id: Any, small_llm: LLM) -> None:
    """An id that cannot be looked up, or that equals another by accident (1, True, 1.0)."""
    with pytest.raises(ValueError, match="request_id="):
        small_llm.engine.add_request(request_id, [1, 2], PARAMS)
    assert not small_llm.engine.has_unfinished_requests()
