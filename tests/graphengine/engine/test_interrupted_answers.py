"""Ctrl-C and requests of several answers: all of them are there, or none."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import pytest

from graphengine.sampling.params import SamplingParams
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Setup
from tests.graphengine.engine.test_interrupted import LineInterrupts

SHARED = tuple(range(60, 69))
PROMPTS = {"a": (*SHARED, 1, 2), "b": (*SHARED, 7), "c": (3, 3, 3, 3)}
PARAMS = {
    "a": SamplingParams(max_tokens=16, n=3, temperature=1.0, seed=1, prompt_logprobs=1, logprobs=2),
    "b": SamplingParams(max_tokens=16, presence_penalty=0.5, prompt_logprobs=0),
    "c": SamplingParams(max_tokens=20, n=2, temperature=0.5, seed=2, stop=("e", "t"), top_k=20),
}
SETUP = Setup(k=3, max_num_seqs=3, num_blocks=11, budget=9)


def run(harness: Harness, turn: str = "") -> dict[str, Any]:
    """Everything that the last outputs say."""
    for name, prompt in PROMPTS.items():
        harness.add(turn + name, prompt, PARAMS[name])
    harness.drain_through_interrupts()
    return {
        name: (
            harness.outputs[turn + name].prompt_logprobs,
            [
                (one.token_ids, one.text, one.finish_reason, one.logprobs)
                for one in harness.outputs[turn + name].outputs
            ],
        )
        for name in PROMPTS
    }


@pytest.mark.parametrize("seed", range(2))
def test_any_line_may_be_the_last(seed: int, checkpoints: Checkpoints) -> None:
    """An answer, a piece of text or a prompt's number lost or given twice."""
    expected = run(Harness(Setup(max_num_seqs=6).start(checkpoints.get())))
    harness = Harness(SETUP.start(checkpoints.get()))
    interrupts = LineInterrupts(harness.engine, seed)
    for turn in range(12):
        assert run(harness, f"{turn}-") == expected
    assert len(interrupts.places) > 5
    assert harness.engine.stats().num_preemptions > 0


def at_line(number: int, names: set[str], action: Callable[[], object]) -> bool:
    """Run it with Ctrl-C before the `number`-th line of these functions; whether that came."""
    left = [number]

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_name not in names:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


LINES = {"emit", "_let_go", "_drop", "next_output", "<dictcomp>", "<genexpr>", "abort", "close"}
BOTH = SamplingParams(max_tokens=1, n=2, temperature=1.0, seed=5)


@pytest.mark.parametrize("action", ["step", "abort"])
def test_answers_that_end_together(action: str, checkpoints: Checkpoints) -> None:
    """Ctrl-C at each line of what ends them, and an engine that can do nothing any more."""
    engine = SETUP.start(checkpoints.get())
    number, fired = 0, True
    while fired:
        number += 1
        name = f"y{number}"
        engine.add_request(name, PROMPTS["c"], BOTH)
        engine.add_request("mate", PROMPTS["c"], SamplingParams(max_tokens=2))
        arguments = () if action == "step" else (name,)
        fired = at_line(number, LINES, partial(getattr(engine, action), *arguments))
        outputs = {}
        while engine.has_unfinished_requests():
            outputs.update({output.request_id: output for output in engine.step()})
        if fired:
            last = outputs[name]
            assert last.finished
            for one in last.outputs:
                assert (one.finish_reason, len(one.token_ids)) in {("length", 1), ("abort", 0)}
        assert outputs["mate"].finished
        assert engine.kv.stats().num_used == 0
        assert not engine.delivery.streams
    assert number > 15


def test_a_close_that_breaks_off(checkpoints: Checkpoints) -> None:
    """An engine that can be closed neither now nor later."""
    number, fired = 0, True
    while fired:
        number += 3
        engine = replace(SETUP, lazy=True, numerics="fast").start(checkpoints.get())
        engine.add_request("y", PROMPTS["c"], BOTH)
        fired = at_line(number, LINES, engine.close)
        engine.close()
    assert number > 15


@pytest.mark.parametrize("when", [1, 2, 3])
def test_a_request_whose_adding_broke_off_has_no_answer(
    when: int, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some answers that run on, and an id that is taken for ever."""
    harness = Harness(SETUP.start(checkpoints.get()))
    expected = run(harness)
    real, calls = harness.engine.scheduler.add, []

    def add(request: Any) -> None:
        calls.append(request)
        if len(calls) == when:
            raise KeyboardInterrupt
        real(request)

    with monkeypatch.context() as patch:
        patch.setattr(harness.engine.scheduler, "add", add)
        with pytest.raises(KeyboardInterrupt):
            harness.engine.add_request("x-a", PROMPTS["a"], PARAMS["a"])
    assert not harness.engine.abort("x-a")
    assert harness.engine.step() == []
    assert run(harness, "x-") == expected
