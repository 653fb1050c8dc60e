"""Ctrl-C and requests of several answers: all of them are there, or none."""

from __future__ import annotations

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
    while harness.engine.has_unfinished_requests():
        try:
            harness.step()
        except KeyboardInterrupt:
            harness.num_interrupts += 1
    harness.check_drained()
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
