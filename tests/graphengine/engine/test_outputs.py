"""Outputs as values: what they cost, that they stay as they were, what they say of themselves."""

from __future__ import annotations

import tracemalloc

from graphengine.models.loader import open_model
from graphengine.outputs import RequestOutput
from graphengine.request import Request, RequestStatus
from graphengine.sampling.params import SamplingParams
from graphengine.streams import OutputStream
from tests.graphengine.engine.checkpoints import Checkpoints

PROMPT = range(1000)


def open_stream(num_steps: int) -> OutputStream:
    """A stream without a tokenizer that has taken over `num_steps` steps of 3 tokens."""
    params = SamplingParams(max_tokens=None)
    stream = OutputStream.open_all([Request("a", PROMPT, params, max_model_len=1 << 20)], None)[0]
    for step in range(num_steps):
        emit(stream, [step, step, step], num_accepted=2)
    return stream


def emit(stream: OutputStream, token_ids: list[int], *, num_accepted: int = 0) -> RequestOutput:
    """What a step does that drafted two tokens; returns its output."""
    request = stream.request
    request.token_ids.extend(token_ids)
    request.token_origins.extend(["accepted"] * num_accepted)
    request.token_origins.append("bonus" if num_accepted == 2 else "recovered")
    return take(stream)


def take(stream: OutputStream) -> RequestOutput:
    output, stream.progress = stream.next_output()
    return output


def test_a_step_costs_what_it_adds() -> None:
    """Answers copied whole at every step: quadratic in their length."""
    peaks = []
    for num_steps in (10, 20_000):
        stream = open_stream(num_steps)
        tracemalloc.start()
        kept = [emit(stream, [7, 7, 7], num_accepted=2) for _ in range(10)]
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(kept[0].outputs[0].token_ids) == 3 * num_steps + 3
    assert peaks[1] < peaks[0] + 1000, f"bytes of ten outputs, short and long: {peaks}"


def test_an_output_does_not_grow() -> None:
    """A window on what is shared that moves with it, or is opened by its reader."""
    stream = open_stream(2)
    before, read = take(stream), take(stream)
    read.outputs[0].token_ids.append(99)
    read.prompt_token_ids.clear()
    after = emit(stream, [7])
    answer = before.outputs[0]
    assert answer.token_ids == [0, 0, 0, 1, 1, 1]
    assert answer.token_origins == ["accepted", "accepted", "bonus"] * 2
    assert after.outputs[0].token_ids == [0, 0, 0, 1, 1, 1, 7]
    assert after.outputs[0].token_origins[-1] == "recovered"
    assert after.prompt_token_ids == list(PROMPT)
    assert isinstance(after.outputs[0].token_ids, list)


def test_a_prompt_is_given_out_as_ids_by_that_name_alone() -> None:
    """A `prompt`, which is text wherever others have one, that holds ids."""
    output = take(open_stream(1))
    assert not hasattr(output, "prompt")
    assert output.prompt_token_ids == list(PROMPT)


def test_texts_add_up(checkpoints: Checkpoints) -> None:
    """Text of a later step in an earlier output, or the last piece in none."""
    tokenizer = open_model(checkpoints.get()).load_tokenizer()
    assert tokenizer is not None
    params = SamplingParams(max_tokens=None)
    request = Request("a", [1], params, max_model_len=100)
    (stream,) = OutputStream.open_all([request], tokenizer)
    outputs: list[RequestOutput] = []
    for token_id in tokenizer.encode("the thin thing é"):
        outputs.append(emit(stream, [token_id]))
    assert not stream.is_behind
    request.status = RequestStatus.FINISHED
    outputs.append(take(stream))
    for index, output in enumerate(outputs):
        pieces = "".join(earlier.new_text for earlier in outputs[: index + 1])
        assert output.outputs[0].text == pieces
    assert outputs[-1].outputs[0].text == "the thin thing é"


def test_answers_compare_and_print_by_what_they_say() -> None:
    """Two equal answers of two runs that differ; a print that shows no answer."""
    first, second = open_stream(2), open_stream(2)
    assert take(first).outputs == take(second).outputs
    assert take(first).outputs != emit(second, [5]).outputs
    assert "token_ids=[0, 0, 0, 1, 1, 1]" in repr(take(first))
