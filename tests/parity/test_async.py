"""Asynchronous stepping: the tokens of synchronous stepping, whatever comes late.

The device is a thread that takes its time, drawn at random, so that results arrive before, while
and after the host plans the next step.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from capture.stream import StreamError, ThreadStream
from graphengine import startup
from graphengine.engine import Engine
from graphengine.flights import Flights
from graphengine.kv.auditor import audit
from graphengine.kv.manager import KVManager
from graphengine.outputs import RequestOutput
from graphengine.request import Request
from graphengine.sampling.params import SamplingParams
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.setups import Setup

SETUP = Setup(k=0, block_size=4, max_model_len=64, max_num_seqs=3, num_blocks=22)
MAX_STEPS = 2000


@pytest.fixture(autouse=True)
def _slow_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every piece of work starts up to 2 ms late."""
    draw = random.Random(5)

    def make_stream(device: torch.device, async_steps: int) -> Any:
        if not async_steps:
            return startup.InlineStream()
        return ThreadStream(delay=lambda: time.sleep(draw.choice([0, 0, 0.0002, 0.002])))

    monkeypatch.setattr(startup, "make_stream", make_stream)


@dataclass
class Run:
    """Steps an engine, and holds its bookkeeping to what is true between steps."""

    engine: Engine
    outputs: dict[str, RequestOutput] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    most_in_flight: int = 0

    def add(self, request_id: str, prompt: tuple[int, ...], params: SamplingParams) -> None:
        self.engine.add_request(request_id, prompt, params)
        for stream in self.engine.delivery.streams[request_id].answers:
            self.requests[stream.request.request_id] = stream.request

    def step(self) -> None:
        for output in self.engine.step():
            old = self.outputs.get(output.request_id)
            assert old is None or not old.finished, "an output after the last one"
            for index, answer in enumerate(output.outputs if old is not None else ()):
                before = old.outputs[index].token_ids if old is not None else []
                assert answer.token_ids[: len(before)] == before, "an emitted token changed"
            self.outputs[output.request_id] = output
        self.most_in_flight = max(self.most_in_flight, len(self.engine.flights))
        audit(self.engine.kv, self.requests.values())
        for request in self.engine.scheduler.running:
            assert self.engine.state.history(request).tolist() == request.token_ids

    def drain(self) -> None:
        for _ in range(MAX_STEPS):
            if not self.engine.has_unfinished_requests():
                break
            self.step()
        else:
            raise AssertionError(f"still running after {MAX_STEPS} steps")
        stats = self.engine.kv.stats()
        assert stats.num_used == 0, "blocks of requests that are gone"

    def tokens(self, request_id: str) -> list[list[int]]:
        return [answer.token_ids for answer in self.outputs[request_id].outputs]

    def reasons(self, request_id: str) -> list[str | None]:
        return [answer.finish_reason for answer in self.outputs[request_id].outputs]


@dataclass(frozen=True)
class Asked:
    """A request of a script, when it comes and when it is dropped."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    arrives: int
    aborts: int | None


def script(seed: int) -> list[Asked]:
    """Random arrivals, lengths, parameters and aborts, more than the pool holds at once."""
    draw = random.Random(seed)
    shared = tuple(draw.randrange(256) for _ in range(24))
    asked = []
    for index in range(14):
        length = draw.choice([1, 3, 4, 5, 8, 13, 21, 40])
        own = tuple(draw.randrange(256) for _ in range(length))
        prompt = (*shared[: draw.choice([0, 0, 8, 24])], *own)[:60]
        params: dict[str, Any] = {"max_tokens": draw.choice([1, 2, 3, 9, 20, None])}
        if draw.random() < 0.5:
            params |= {"temperature": 0.9, "seed": index, "top_k": draw.choice([0, 5])}
        if draw.random() < 0.3:
            params |= {"repetition_penalty": 1.4, "frequency_penalty": 0.3}
        if draw.random() < 0.3:
            params |= {"stop_token_ids": [draw.randrange(256) for _ in range(20)]}
        if draw.random() < 0.2:
            params |= {"logprobs": 2}
        if draw.random() < 0.2:
            params |= {"prompt_logprobs": 1}
        if seed % 4 == 3 and draw.random() < 0.2:  # makes steps wait for each other
            params |= {"min_tokens": min(3, params["max_tokens"] or 3)}
        if draw.random() < 0.2 and len(prompt) < 20:
            params |= {"n": 2, "temperature": 1.1, "seed": index}
        arrives = draw.randrange(30)
        aborts = arrives + draw.randrange(1, 12) if draw.random() < 0.3 else None
        asked.append(Asked(str(index), prompt, SamplingParams(**params), arrives, aborts))
    return asked


def serve(engine: Engine, asked: list[Asked], *, aborts: bool) -> Run:
    run = Run(engine)
    for now in range(45):
        for one in asked:
            if one.arrives == now:
                run.add(one.request_id, one.prompt, one.params)
            if aborts and one.aborts == now:
                engine.abort(one.request_id)
        run.step()
    run.drain()
    return run


def start(checkpoint: Path, setup: Setup, async_steps: int) -> Engine:
    config = replace(setup.config(), async_steps=async_steps)
    return Engine(checkpoint, config)


@pytest.fixture(scope="module")
def landed() -> Iterator[dict[str, int]]:
    """Counts what arrived, and what of it nobody wanted any more."""
    counts = {"read": 0, "dropped": 0}
    land = Flights.land

    def spy(self: Flights) -> Any:
        size = len(self._flights[0].decodes)
        found = land(self)
        counts["read"] += size
        counts["dropped"] += size - len(found)
        return found

    Flights.land = spy  # type: ignore[method-assign]
    yield counts
    Flights.land = land  # type: ignore[method-assign]


@pytest.mark.parity
@pytest.mark.parametrize("seed", range(8))
def test_streams_are_those_of_synchronous_stepping(
    seed: int, checkpoints: Checkpoints, landed: dict[str, int]
) -> None:
    """A late token in another request's row, a lost or doubled one, a block freed too early."""
    setup = replace(
        SETUP,
        num_blocks=(18, 22, 40)[seed % 3],
        chunked=seed % 4 != 1,
        budget=None if seed % 4 == 1 else (8, 64)[seed % 2],
        prefix=seed % 5 != 2,
        debug=seed % 2 == 0,
    )
    asked = script(seed)
    truth = serve(start(checkpoints.get(), setup, 0), asked, aborts=False)
    before = dict(landed)
    waits = any(one.params.needs_tokens for one in asked)
    engine = start(checkpoints.get(), setup, 1)
    run = serve(engine, asked, aborts=True)
    assert run.most_in_flight == 1
    assert waits or landed["dropped"] > before["dropped"], "nothing came late"
    for one in asked:
        for found, wanted in zip(
            run.tokens(one.request_id), truth.tokens(one.request_id), strict=True
        ):
            assert found == wanted[: len(found)]
        if one.aborts is None:
            assert run.tokens(one.request_id) == truth.tokens(one.request_id)
            assert run.reasons(one.request_id) == truth.reasons(one.request_id)
    engine.close()


def test_a_late_result_never_reaches_a_reused_row(checkpoints: Checkpoints) -> None:
    """One request at a time, so that each takes the row in which the last step of another ran."""
    setup = replace(SETUP, max_num_seqs=1, num_blocks=40)
    params = [SamplingParams(max_tokens=3 + i % 4, ignore_eos=True) for i in range(12)]
    runs = []
    for async_steps in (0, 1):
        run = Run(start(checkpoints.get(), setup, async_steps))
        for index, one in enumerate(params):
            run.add(str(index), (index, 7, index), one)
            run.step()
            if index % 3 == 2:  # with a step of it under way
                run.engine.abort(str(index))
        run.drain()
        runs.append(run)
    for index, one in enumerate(params):
        [[sync]], [[late]] = ([run.tokens(str(index))] for run in runs)
        if index % 3 != 2:
            assert late == sync
            assert len(late) == one.max_tokens
        else:
            assert late == sync[: len(late)]


def test_a_step_that_fails_on_the_device_costs_nobody_a_token(checkpoints: Checkpoints) -> None:
    """An engine that is jammed for good, or goes on from rows that were never written."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    truth = Run(start(checkpoints.get(), SETUP, 0))
    engine = start(checkpoints.get(), SETUP, 1)
    run = Run(engine)
    for each in (truth, run):
        for name in ("a", "b"):
            each.add(name, (1, 2, 3, ord(name)), params)
    truth.drain()
    for _ in range(4):
        run.step()

    def fail() -> None:
        raise ArithmeticError("out of memory")

    engine.runner.stream.run(fail)
    with pytest.raises(StreamError, match="out of memory"):
        run.drain()
    run.drain()
    for name in ("a", "b"):
        assert run.tokens(name) == truth.tokens(name)
    run.add("c", (5, 6), params)
    run.step()
    engine.runner.stream.run(fail)
    engine.runner.stream.run(lambda: None)
    engine.close()
    assert not hasattr(engine, "runner"), "its memory is held"


@pytest.mark.parametrize("async_steps", [0, 1])
@pytest.mark.parametrize("place", ["land", "recount"])
def test_an_interrupted_landing_loses_nothing(
    async_steps: int, place: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row on the device that is ahead of the host, and a step that goes on from it."""
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    truth = Run(start(checkpoints.get(), SETUP, 0))
    run = Run(start(checkpoints.get(), SETUP, async_steps))
    for each in (truth, run):
        each.add("a", (1, 2, 3), params)
    truth.drain()
    for _ in range(3):
        run.step()
    real = getattr(Flights, place)
    with monkeypatch.context() as patch:

        def interrupted(self: Flights, *given: Any) -> Any:
            if place == "land":
                real(self, *given)  # and its tokens are lost
            if place == "land" or len(self._flights) == async_steps:
                raise KeyboardInterrupt
            return real(self, *given)

        patch.setattr(Flights, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.drain()
    run.drain()
    assert run.tokens("a") == truth.tokens("a")


@pytest.mark.parametrize("who", ["lazy", "prompt_logprobs"])
def test_a_failed_prefill_is_made_good_whoever_hears_of_it(
    who: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV that was never written, and is taken for what it should hold."""
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    truth = Run(start(checkpoints.get(), SETUP, 0))
    run = Run(start(checkpoints.get(), replace(SETUP, lazy=who == "lazy"), 1))
    for each in (truth, run):
        each.add("a", tuple(range(3, 24)), params)
    truth.drain()
    decoder = run.engine.runner.decoder
    with monkeypatch.context() as patch:

        def fail(*_: Any) -> None:
            raise MemoryError("out of memory")

        patch.setattr(decoder, "forward", fail)
        run.step()
        run.engine.runner.stream.record()
        time.sleep(0.05)
    if who == "prompt_logprobs":
        run.add("b", (1, 2, 3, 4, 5), replace(params, prompt_logprobs=1))
    with pytest.raises(StreamError, match="out of memory"):
        run.drain()
    run.drain()
    assert run.tokens("a") == truth.tokens("a")


def test_an_interrupted_wait_for_an_area_is_waited_for_again(checkpoints: Checkpoints) -> None:
    """Inputs of a launched step that are overwritten before they were copied."""
    gate, engine = threading.Event(), start(checkpoints.get(), SETUP, 1)
    edge, stream = engine.runner.edge, engine.runner.stream
    stream.run(lambda: gate.wait())
    edge._sent[edge.area] = real = stream.record()

    class Interrupted:
        def wait(self) -> None:
            raise KeyboardInterrupt

    edge._sent[edge.area] = interrupted = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        edge.begin()
    assert edge._sent[edge.area] is interrupted, "the next one would not wait"
    edge._sent[edge.area] = real
    gate.set()
    edge.begin()
    assert edge._sent[edge.area] is None
    engine.close()


def test_starting_over_may_be_interrupted(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fresh pool below old block tables, because nobody remembers that it broke off."""
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    truth, run = (Run(start(checkpoints.get(), SETUP, steps)) for steps in (0, 1))
    for each in (truth, run):
        for name in ("a", "b"):
            each.add(name, (9, 8, 7, ord(name)), params)
    truth.drain()
    for _ in range(6):
        run.step()
    land = Flights.land

    def lost(self: Flights) -> None:
        land(self)
        raise KeyboardInterrupt

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for owner, name, replacement in (
        (Flights, "land", lost),
        (KVManager, "_make_cache", interrupt),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, replacement)
            with pytest.raises(KeyboardInterrupt):
                run.engine.step()
    run.drain()
    for name in ("a", "b"):
        assert run.tokens(name) == truth.tokens(name)
