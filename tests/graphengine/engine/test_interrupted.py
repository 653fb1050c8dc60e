"""Steps that break off: Ctrl-C or an error at the seams of a step, which the next one makes good.

Two state rows for five requests, so that every row has held somebody else before, and prompts that
share blocks, so that KV computed from the wrong row would be found by those who come later.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Literal

import pytest

from graphengine import engine as engine_module
from graphengine import streams as streams_module
from graphengine.engine import Engine
from graphengine.outputs import RequestOutput
from graphengine.request_state import StaleRowError
from graphengine.sampling.params import SamplingParams
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Setup, scripted

SHARED = tuple(range(60, 69))
PROMPTS = {
    "long": (*SHARED, *range(9)),
    "short": (3,),
    "middle": (*SHARED, 7, 7),
    "late": (*SHARED, *range(30, 37)),
    "last": (9, 8, 7, 6, 5),
}
Streams = dict[str, list[int]]
# A dry pool and a budget of few rows: chunks, preemption and recompute are all in it.
SETUP = Setup(k=3, compile="off", max_num_seqs=2, num_blocks=14, budget=9)
WHEN = (1, 3, 6)  # which call of a function is interrupted
POINTS: dict[str, tuple[Callable[[Engine], Any], str, Literal["before", "after"]]] = {
    "inside-schedule": (lambda engine: engine.scheduler, "_plan_chunks", "before"),
    "after-schedule": (lambda engine: engine.scheduler, "schedule", "after"),
    "before-a-start": (lambda engine: engine.scheduler, "_start", "before"),
    "after-a-match": (lambda engine: engine.kv, "match_prefix", "after"),
    "after-a-reserve": (lambda engine: engine.kv, "reserve_rows", "after"),
    "after-blocks": (lambda engine: engine.kv.pool, "allocate", "after"),
    "before-free": (lambda engine: engine.kv.pool, "free", "before"),
    "before-a-row": (lambda engine: engine.state, "follow", "before"),
    "after-a-row": (lambda engine: engine.state, "follow", "after"),
    "after-prefill": (lambda engine: engine.runner, "prefill", "after"),
    "after-a-chunk": (lambda engine: engine.kv, "advance_prefill", "after"),
    "after-verify": (lambda engine: engine.runner, "verify", "after"),
    "before-commit": (lambda engine: engine_module, "commit", "before"),
    "inside-commit": (lambda engine: engine.kv, "keep_rows", "before"),
    "after-commit": (lambda engine: engine_module, "commit", "after"),
    "inside-finish": (lambda engine: engine.scheduler, "_leave_running", "before"),
    "inside-an-output": (lambda engine: streams_module, "RequestOutput", "before"),
    "after-an-output": (lambda engine: streams_module.OutputStream, "next_output", "after"),
    "after-emit": (lambda engine: engine.delivery, "emit", "after"),
}
STEPS_BETWEEN = 12
MOST_LINES = 300  # fewer than a step has, as a rule
BOOKKEEPING = {
    sys.modules[f"graphengine.{name}"].__file__
    for name in (
        "commit",
        "delivery",
        "engine",
        "flights",
        "frame",
        "kv.block_pool",
        "kv.block_table",
        "kv.manager",
        "kv.prefix_cache",
        "models.detokenizer",
        "prompt_logprobs",
        "request_state",
        "sampled",
        "scheduler",
        "streams",
    )
}


def params(streams: Streams | None = None) -> dict[str, SamplingParams]:
    """One request ends by a stop id that is known to come, the others by their limit."""
    each = dict.fromkeys(PROMPTS, SamplingParams(max_tokens=11, ignore_eos=True))
    if streams is not None:
        stop = streams["middle"][len(PROMPTS["middle"]) + 5]
        each["middle"] = SamplingParams(max_tokens=11, ignore_eos=True, stop_token_ids=(stop,))
    return each


def run(harness: Harness, each: dict[str, SamplingParams], prefix: str = "") -> Streams:
    """Serve all prompts, going on after every Ctrl-C; whole streams."""
    for name, prompt in PROMPTS.items():
        harness.add(prefix + name, prompt, each[name])
    harness.drain_through_interrupts()
    return {name: [*prompt, *harness.stream(prefix + name)] for name, prompt in PROMPTS.items()}


@pytest.fixture(scope="module")
def unstopped(checkpoints: Checkpoints) -> Streams:
    return run(Harness(Setup(compile="off", prefix=False).start(checkpoints.get())), params())


@pytest.fixture(scope="module")
def undisturbed(checkpoints: Checkpoints, unstopped: Streams) -> Streams:
    harness = Harness(Setup(compile="off", prefix=False).start(checkpoints.get()))
    return run(harness, params(unstopped))


def break_off(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, side: str, when: int
) -> list[int]:
    """Ctrl-C at the `when`-th call of a function; the list has an entry once it has come."""
    real, calls, fired = getattr(owner, name), [0], []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        due = calls[0] == when
        if due:
            fired.append(when)
        if due and side == "before":
            raise KeyboardInterrupt
        result = real(*args, **kwargs)
        if due:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, name, interrupted)
    return fired


def start(checkpoints: Checkpoints, unstopped: Streams) -> Harness:
    by_prompt = {prompt: unstopped[name][len(prompt) :] for name, prompt in PROMPTS.items()}
    proposer = scripted("exactly", by_prompt, accept=2)  # type: ignore[arg-type]
    return Harness(SETUP.start(checkpoints.get(), proposer))


def check(harness: Harness, unstopped: Streams, undisturbed: Streams, prefix: str) -> None:
    assert run(harness, params(unstopped), prefix) == undisturbed
    reasons = {name: harness.reason(prefix + name) for name in PROMPTS}
    assert reasons == {**dict.fromkeys(PROMPTS, "length"), "middle": "stop"}


@pytest.mark.parametrize("point", POINTS)
def test_streams_are_those_of_an_undisturbed_run(
    point: str,
    checkpoints: Checkpoints,
    unstopped: Streams,
    undisturbed: Streams,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request served from the row of the one before it, and its KV found by those after it."""
    harness = start(checkpoints, unstopped)
    for when in WHEN:
        with monkeypatch.context() as patch:
            owner, name, side = POINTS[point]
            fired = break_off(patch, owner(harness.engine), name, side, when)
            check(harness, unstopped, undisturbed, f"{when}-")
            check(harness, unstopped, undisturbed, f"{when}-again-")
            assert fired
    assert max(out.metrics.num_cached_tokens for out in harness.outputs.values()) > 0


class LineInterrupts:
    """Ctrl-C in one step of many, before a random line of an engine's bookkeeping."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.places: set[str] = set()
        self._random = random.Random(seed)
        self._num_steps, self._num_left = 0, 0
        self._step = engine.step
        engine.step = self.step  # type: ignore[method-assign]

    def step(self) -> Sequence[RequestOutput]:
        self._num_steps += 1
        if self._num_steps % STEPS_BETWEEN:  # what starts over must get further than it was
            return self._step()
        self._num_left = self._random.randrange(1, MOST_LINES)
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            return self._step()
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        # Outputs that are on their way out of `step` are lost with what it returns.
        if code.co_filename not in BOOKKEEPING or code.co_name == "take":
            return None
        if event == "line":
            self._num_left -= 1
            if self._num_left == 0:
                self.places.add(f"{code.co_name}:{frame.f_lineno}")
                raise KeyboardInterrupt
        return self._trace


@pytest.mark.parametrize("seed", [0, 25, 36])  # the last two: between a launch and its landing
def test_any_line_may_be_the_last(
    seed: int, checkpoints: Checkpoints, unstopped: Streams, undisturbed: Streams
) -> None:
    """Rows, blocks, requests or outputs lost between two lines, and an engine that is stuck."""
    harness = start(checkpoints, unstopped)
    interrupts = LineInterrupts(harness.engine, seed)
    for turn in range(16):
        check(harness, unstopped, undisturbed, f"{turn}-")
    assert len(interrupts.places) > 10


@pytest.mark.parametrize("side", ["before", "after"])
def test_a_request_whose_adding_broke_off_is_not_there(
    side: str, checkpoints: Checkpoints, unstopped: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queued request that nobody can abort, and whose first token ends somebody else's step."""
    harness = start(checkpoints, unstopped)
    each = params()
    harness.add("short", PROMPTS["short"], each["short"])
    with monkeypatch.context() as patch:
        break_off(patch, harness.engine.scheduler, "add", side, 1)
        with pytest.raises(KeyboardInterrupt):
            harness.engine.add_request("long", PROMPTS["long"], each["long"])
    assert not harness.engine.abort("long")
    harness.add("long", PROMPTS["long"], each["long"])
    harness.drain()
    for name in ("short", "long"):
        assert [*PROMPTS[name], *harness.stream(name)] == unstopped[name]


def test_a_row_that_is_not_up_to_date_is_not_read(checkpoints: Checkpoints) -> None:
    """The tokens of whoever had the row before, or a request's own of a step ago."""
    engine = SETUP.start(checkpoints.get())
    engine.add_request("a", [1, 2, 3])
    engine.step()
    (request,) = engine.scheduler.running
    assert engine.state.history(request).tolist() == request.token_ids
    request.token_ids.append(5)
    with pytest.raises(StaleRowError, match="has 3 tokens"):
        engine.state.row_of(request)
    request.token_ids.pop()
    assert request.admission is not None
    request.admission += 1
    with pytest.raises(StaleRowError, match="another's"):
        engine.state.row_of(request)
