"""The order in which a proposer that carries a model is called, and what it may answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from graphengine.engine import Engine
from graphengine.sampling.params import SamplingParams
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.setups import Setup

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
PROMPT = [5, 6, 7, 8, 9, 10]


@pytest.fixture
def engine(checkpoints: Checkpoints) -> Iterator[Engine]:
    target = checkpoints.get()
    engine = Setup(k=3).start(target, method="draft_model", model=str(target))
    yield engine
    engine.close()


def spy(engine: Engine, monkeypatch: pytest.MonkeyPatch, name: str, then: Any) -> None:
    """Call `then(what the proposer's method gave)`; its value is what the engine gets."""
    real = getattr(engine.proposer, name)
    monkeypatch.setattr(engine.proposer, name, lambda *given: then(real(*given)))


def finish(engine: Engine) -> dict[str, list[int]]:
    streams = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            streams[output.request_id] = output.outputs[0].token_ids
    return streams


def test_who_starts_over_is_forgotten_before_it_comes_anew(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a proposer that keeps what it knows by request, and forgets what is new."""
    calls: list[str] = []
    for name in ("prefill", "propose", "forget"):

        def note(found: Any, name: str = name) -> Any:
            calls.append(name)
            return found

        spy(engine, monkeypatch, name, note)
    engine.add_request("a", PROMPT, PARAMS)
    engine.step()
    engine.step()
    assert calls == ["prefill", "propose"]
    with monkeypatch.context() as patch:
        patch.setattr("graphengine.engine.commit", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    calls.clear()
    engine.step()
    engine.step()
    assert calls[:3] == ["forget", "prefill", "propose"]
    finish(engine)


def test_an_abort_out_of_a_prefill(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards everybody's work, which would be done again, and the cached prefixes."""

    def abort(found: Any) -> Any:
        engine.abort("a")
        return found

    with monkeypatch.context() as patch:
        spy(engine, patch, "prefill", abort)
        engine.add_request("a", PROMPT, PARAMS)
        engine.add_request("b", PROMPT[1:], PARAMS)
        outputs = engine.step()
    assert [output.request_id for output in outputs if output.finished] == ["a"]
    assert not engine._is_torn
    streams = finish(engine)
    engine.draft_limit = 0
    engine.add_request("b", PROMPT[1:], PARAMS)
    assert finish(engine) == streams


@pytest.mark.parametrize("aborted", ["a", "b"])
def test_an_abort_out_of_a_requests_own_function(engine: Engine, aborted: str) -> None:
    """Guards a step that is broken off for a row that nobody waits for any more."""

    def allow(prompt: list[int], output: list[int]) -> list[int]:
        if output:
            engine.abort(aborted)
        return list(range(40))

    engine.add_request("a", PROMPT, replace(PARAMS, allowed_tokens_fn=allow))
    engine.add_request("b", PROMPT[1:], PARAMS)
    streams = finish(engine)
    assert {name: len(stream) == 8 for name, stream in streams.items()} == {
        "a": aborted != "a",
        "b": aborted != "b",
    }
    assert engine.kv.pool.num_used == 0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([5], r"gave \[5\] for its prefill: expected an int32 array"),
        (np.array([5]), r"gave int64 \(1,\) for its prefill, expected int32 \(1,\)"),
        (np.array([5, 5], dtype=np.int32), r"gave int32 \(2,\) for its prefill"),
        (
            np.array([6], dtype=np.int32),
            "says that 6 slots of 'a' hold draft KV; there were 0, and",
        ),
        (np.array([-1], dtype=np.int32), "says that -1 slots of 'a'"),
    ],
)
def test_what_a_prefill_may_answer(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, answer: Any, message: str
) -> None:
    """Guards draft KV that is said to be there and that nobody can have written."""
    spy(engine, monkeypatch, "prefill", lambda found: answer)
    engine.add_request("a", PROMPT, PARAMS)
    with pytest.raises(AssertionError, match=message):
        engine.step()
