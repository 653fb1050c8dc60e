"""Asynchronous stepping with drafts: a chain runs before the host has seen what it goes on from.

The same slow device as in `test_async.py`. Whatever a model drafts then, the tokens are those of
synchronous stepping and of no drafts at all; a self-draft is right at every position, so that a row
of draft KV that was made of other tokens, or of none, shows as a draft that is not accepted.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from capture.stream import ThreadStream
from graphengine import startup
from graphengine.drafting import WAITS
from graphengine.engine import Engine
from graphengine.sampling.params import SamplingParams
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.setups import Setup
from tests.parity.random_policy import decide_at_random
from tests.parity.test_async import Asked, Run, _slow_device, script, serve

__all__ = ["_slow_device"]  # a fixture

pytestmark = pytest.mark.parity

TINY = Path(__file__).parents[1] / "weights" / "tiny"
SETUP = Setup(k=3, max_num_seqs=3, num_blocks=26, num_reqs=(2,))


@dataclass(frozen=True)
class Pair:
    """A target and what drafts for it."""

    target: Path
    method: str
    model: Path

    def start(self, setup: Setup, async_steps: int, **options: Any) -> Engine:
        given = {"method": self.method, "model": str(self.model), **options} if setup.k else {}
        return Engine(self.target, replace(setup.config(**given), async_steps=async_steps))


@pytest.fixture
def pair(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> Pair:
    if request.param == "self":
        return Pair(checkpoints.get(), "draft_model", checkpoints.get())
    method = request.param.rstrip("13")
    return Pair(TINY / "target", method, TINY / request.param)


def with_limits(engine: Engine, limits: Sequence[int]) -> Engine:
    """Have the draft limit change with every step."""
    step, turn = engine.step, 0

    def limited() -> Any:
        nonlocal turn
        engine.draft_limit = limits[turn % len(limits)]
        turn += 1
        return step()

    engine.step = limited  # type: ignore[method-assign]
    return engine


def check_same(run: Run, truth: Run, asked: list[Asked]) -> None:
    for one in asked:
        for found, wanted in zip(
            run.tokens(one.request_id), truth.tokens(one.request_id), strict=True
        ):
            assert found == wanted[: len(found)], one
        if one.aborts is None:
            assert run.tokens(one.request_id) == truth.tokens(one.request_id)
            assert run.reasons(one.request_id) == truth.reasons(one.request_id)


@pytest.mark.parametrize("pair", ["self", "draft_model", "eagle1", "eagle3", "mtp"], indirect=True)
@pytest.mark.parametrize("seed", [0, 1, 3])
def test_streams_are_those_of_synchronous_stepping_and_of_no_drafts(seed: int, pair: Pair) -> None:
    """Drafts of another request, or of tokens that have not come; late results, freed blocks."""
    setup = replace(
        SETUP,
        num_blocks=(22, 26, 40)[seed % 3],
        budget=(12, 64)[seed % 2],
        prefix=seed != 1,
        debug=seed == 0,
    )
    asked = script(seed)
    off = serve(pair.start(replace(setup, k=0), 0), asked, aborts=False)
    sync = serve(pair.start(setup, 0, draft_sampling="coupled"), asked, aborts=False)
    engine = pair.start(setup, 1, draft_sampling="coupled")
    if seed == 1:
        decide_at_random(engine, seed)
    limits = (3, 3, 3, 0, 0, 3, 1, 3, 2, 2) if seed == 3 else (3,)
    run = serve(with_limits(engine, limits), asked, aborts=True)
    assert run.most_in_flight == 1
    check_same(sync, off, [replace(one, aborts=None) for one in asked])
    check_same(run, off, asked)
    stats = engine.stats()
    assert stats.num_draft_tokens > 30
    assert stats.compile_events_after_warmup == 0
    for one in (off, sync, run):
        one.engine.close()


PARAMS = [
    SamplingParams(max_tokens=most, ignore_eos=True, temperature=temperature, seed=most)
    for most, temperature in ((25, 0.0), (9, 0.8), (40, 0.0), (3, 1.2), (17, 0.7), (30, 0.0))
]


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("limits", [(9,), (9, 9, 9, 0, 9, 9), (9, 0, 0, 0, 0, 9, 1, 1, 9, 2)])
@pytest.mark.parametrize("pair", ["self"], indirect=True)
def test_a_self_draft_is_always_right(k: int, limits: tuple[int, ...], pair: Pair) -> None:
    """Rows of rejected or unseen tokens in the draft KV; a gap that nobody has filled."""
    setup = replace(SETUP, k=k, num_blocks=30, num_reqs=None, budget=20, lazy=k == 2)
    engine = pair.start(setup, 1, draft_sampling="coupled")
    run = Run(with_limits(engine, [min(limit, k) for limit in limits]))
    draw, prompts = random.Random(k), [tuple(range(3, 3 + n)) for n in (1, 2, 5, 8, 13, 21)]
    for turn in range(12):
        prompt = prompts[turn % 6][: draw.choice([1, 4, 30])]
        run.add(str(turn), prompt, PARAMS[turn % 6])
        for _ in range(draw.randrange(6)):
            run.step()
        if turn % 5 == 4:
            engine.abort(str(turn))
    run.drain()
    stats = engine.stats()
    assert run.most_in_flight == 1
    assert stats.num_draft_tokens > 60
    assert stats.num_accepted_tokens == stats.num_draft_tokens, stats.accepted_per_position
    engine.close()


TEXT = "def main(path: str) -> None:\n    for name in sorted(os.listdir(path)):\n        print("


@pytest.mark.parametrize("pair", ["draft_model", "eagle1", "eagle3", "mtp"], indirect=True)
def test_drafts_are_those_of_synchronous_stepping(pair: Pair) -> None:
    """Draft KV of drafts that were not accepted; a window that begins behind the last right row."""
    origins, limit = [], 120
    for async_steps in (0, 1):
        setup = replace(SETUP, num_blocks=60, max_model_len=256)
        engine = pair.start(setup, async_steps, self_check="error")
        run = Run(engine)
        run.add("a", tuple(TEXT.encode()), SamplingParams(max_tokens=limit, ignore_eos=True))
        run.drain()
        origins.append(run.requests["a"].token_origins)
        engine.close()
    common = limit - 2 * (SETUP.k + 1)  # near its end a request may have fewer drafts
    assert origins[0][:common] == origins[1][:common]
    assert {"accepted", "recovered"} <= set(origins[0][:common])


@pytest.mark.parametrize("pair", ["self"], indirect=True)
def test_steady_drafting_waits_for_nobody(pair: Pair) -> None:
    """Steps that are asynchronous in name, and land before each launch."""
    engine = pair.start(replace(SETUP, num_blocks=60), 1)
    run = Run(engine)
    for index in range(3):
        run.add(str(index), (index, 5), SamplingParams(max_tokens=30, ignore_eos=True))
    in_flight = []
    while engine.has_unfinished_requests():
        run.step()
        in_flight.append(len(engine.flights))
    assert in_flight.count(1) > 5
    assert in_flight[1:-2].count(0) <= 1
    assert WAITS not in engine.stats().eager_fallbacks
    engine.close()


def _late() -> None:
    time.sleep(0.001)


@pytest.mark.parametrize("pair", ["self", "eagle3"], indirect=True)
@pytest.mark.parametrize("verification", ["exact", "rejection"])
def test_synchronous_steps_of_a_device_with_a_stream(
    verification: Any, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: drafts that are read too early, or with a request's own functions not at all."""
    setup, asked = replace(SETUP, verification=verification), script(3)
    sampling = {"exact": "coupled", "rejection": "probabilistic"}[verification]
    runs = []
    for delays in (False, True):
        if delays:
            monkeypatch.setattr(startup, "make_stream", lambda *given: ThreadStream(_late))
        engine = pair.start(setup, 0, draft_sampling=sampling)
        runs.append(serve(engine, asked, aborts=False))
    assert any(one.params.needs_tokens for one in asked)
    check_same(runs[1], runs[0], [replace(one, aborts=None) for one in asked])
    pairs = [
        (one.num_draft_tokens, one.num_accepted_tokens) for one in (r.engine.stats() for r in runs)
    ]
    assert pairs[0] == pairs[1]
    for run in runs:
        run.engine.close()


@pytest.mark.parametrize("pair", ["mtp"], indirect=True)
def test_a_gap_is_filled_by_a_step_that_waits(pair: Pair) -> None:
    """Drafts that never come back after a pause, since no step has all that is known at hand."""
    engine = pair.start(replace(SETUP, num_blocks=60), 1)
    run = Run(with_limits(engine, [3, 3, 3, *[0] * 8, 3, 3, 3, 3, 3]))
    run.add("a", (5, 6, 7), SamplingParams(max_tokens=50, ignore_eos=True))
    run.drain()
    stats = engine.stats()
    assert stats.eager_fallbacks[WAITS] > 0
    assert stats.eager_fallbacks["fill:mtp"] > 1, "only the prompt was filled"
    engine.close()


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("ngram", {}, "proposer 'ngram' needs the tokens of a step"),
        ("suffix", {}, "proposer 'suffix' needs the tokens of a step"),
        ("draft_model", {"override": "ngram"}, "override='ngram' matches the text"),
        ("draft_model", {"verification": "rejection"}, "verification='rejection' takes"),
    ],
)
def test_what_needs_the_host_is_refused(
    method: str, options: dict[str, Any], message: str, checkpoints: Checkpoints
) -> None:
    """A mode that would quietly be synchronous, or draft from what it has not seen."""
    if method == "draft_model":
        options = {"model": str(checkpoints.get()), **options}
    config = replace(SETUP.config(method=method, **options), async_steps=1)
    with pytest.raises(ValueError, match=f"async_steps=1: {message}"):
        Engine(checkpoints.get(), config)
