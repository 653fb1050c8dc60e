"""Distributions off and on: what is counted, and what is said of it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from capture.config import CaptureConfig
from graphengine.bench.distributions import two_sample_p
from graphengine.bench.laws import ENDED, LEVEL, ON_SEEDS, LawCheck, check_laws
from graphengine.bench.serve import Asked, make_jobs
from graphengine.config import EngineConfig
from graphengine.engine import Engine
from graphengine.sampling.cpu import NativeSampler
from graphengine.sampling.params import SamplingParams
from graphengine.speculative_config import SpeculativeConfig
from proposers.base import Draft, ProposeInputs

ALLOWED = (5, 6, 7, 8)
PROMPTS = [
    Asked(group="g", prompt_id="a", token_ids=[5, 6, 7, 5, 6, 7, 5, 6]),
    Asked(group="g", prompt_id="b", token_ids=[8, 5, 8, 5, 8, 5, 8]),
]
PARAMS = SamplingParams(
    max_tokens=6, temperature=0.8, allowed_token_ids=ALLOWED, stop_token_ids=(8,)
)
NUM_SAMPLES = 250


def no_drafts(self: object, inputs: ProposeInputs) -> Draft:
    return Draft.from_rows([[]] * inputs.num_reqs, inputs.k)


@pytest.fixture
def engine_of(checkpoint: Path) -> Callable[[], Engine]:
    """Starts an engine that verifies by rejection; eager, so that a test may patch its pieces."""
    config = EngineConfig(
        dtype="float32",
        max_model_len=32,
        max_num_seqs=8,
        speculative=SpeculativeConfig(
            "ngram", max_draft_tokens=2, verification="rejection", adaptive=False
        ),
        capture=CaptureConfig(graph="eager"),
    )
    return lambda: Engine(checkpoint, config)


def run(engine: Engine, samples: int = NUM_SAMPLES, params: SamplingParams = PARAMS) -> LawCheck:
    off, on = (
        make_jobs(PROMPTS, params, samples=samples, first_seed=seed) for seed in (0, ON_SEEDS)
    )
    found = check_laws(engine, off, on)
    engine.close()
    return found


def test_a_correct_engine_passes(engine_of: Callable[[], Engine]) -> None:
    """Guards a check that cries wolf, and counts that are not those of the streams."""
    found = run(engine_of())
    assert found.verdict.holds, found.verdict
    assert found.verdict.text.startswith("no difference found (smallest p after Holm ")
    singles, pairs = [(at,) for at in range(6)], [(at, at + 1) for at in range(5)]
    assert [place.positions for place in found.places] == [*singles, *pairs] * 2
    assert [place.prompt_id for place in found.places] == ["a"] * 11 + ["b"] * 11
    seeds = {job.params.seed for side in (found.off, found.on) for job in side.jobs}
    assert len(seeds) == 4 * NUM_SAMPLES
    streams = [stream.token_ids for stream in found.on.of(1)]
    second, joint = found.places[12], found.places[17]
    for token, count in zip(second.tokens, second.on, strict=True):
        assert count == sum((ids[1:2] or [ENDED]) == list(token) for ids in streams)
    for tokens, count in zip(joint.tokens, joint.on, strict=True):
        assert count == sum(tuple([*ids[:2], ENDED][:2]) == tokens for ids in streams)
    assert all(sum(place.off) == sum(place.on) == NUM_SAMPLES for place in found.places)
    assert (ENDED,) in second.tokens  # a stop is an outcome like another
    assert second.p == two_sample_p(second.off, second.on)
    assert found.places[0].num_drafts == NUM_SAMPLES  # n-gram has a guess from the first token on


def test_a_skipped_residual_is_caught(
    engine_of: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a check that cannot fail: here a rejected draft's place goes to a plain sample."""
    sample = NativeSampler.__call__

    def without_residual(self: NativeSampler, views: dict[str, torch.Tensor]) -> None:
        reject, self._reject = self._reject, None
        sample(self, views)
        plain = views["target_ids"].clone()
        self._reject = reject
        sample(self, views)
        accepted = views["target_ids"] == torch.roll(views["token_ids"], -1)
        views["target_ids"].copy_(torch.where(accepted, views["target_ids"], plain))

    monkeypatch.setattr(NativeSampler, "__call__", without_residual)
    found = run(engine_of())
    assert not found.verdict.holds
    assert found.verdict.text.startswith("different (smallest p after Holm ")
    assert any(place.positions == (0,) for place in found.different)
    assert all(place.p <= place.p_adjusted < LEVEL for place in found.different)


def test_drafts_that_are_all_accepted_late_are_caught(engine_of: Callable[[], Engine]) -> None:
    """A fault that leaves each token's own distribution as it was, or comes late in an answer."""
    engine = engine_of()
    real = engine.runner.verify

    def verify(requests: Any, draft: Any) -> Any:
        frame = real(requests, draft)
        packed = frame.packed()
        drafts, lengths = draft.token_ids, draft.num_draft_tokens
        for row, (request, length) in enumerate(zip(requests, lengths.tolist(), strict=True)):
            count = min(length, request.limit - request.num_tokens)
            if request.num_output_tokens >= 3 and count:
                packed[row] = [count, count, *drafts[row, :count], *[-1] * (3 - count)]
                device, place = engine.state.device, engine.state.row_of(request)
                known = torch.tensor([*request.token_ids, *drafts[row, :count]])
                device.token_ids[place, : len(known)] = known
                device.num_tokens[place] = len(known)
        return frame  # whose numbers these are

    engine.runner.verify = verify  # type: ignore[method-assign]
    found = run(engine, params=replace(PARAMS, max_tokens=8, stop_token_ids=()))
    assert not found.verdict.holds
    assert min(place.positions[-1] for place in found.different) >= 3


def test_what_shows_nothing_does_not_hold(
    engine_of: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards "no difference" of samples too small to have one, or of a side that never drafted."""
    assert run(engine_of(), samples=4).verdict.text.startswith("nothing was tested")
    one = replace(PARAMS, allowed_token_ids=(5,), max_tokens=2)
    certain = run(engine_of(), samples=40, params=one)
    assert not certain.tested
    assert not certain.verdict.holds
    engine = engine_of()
    monkeypatch.setattr(type(engine.proposer), "propose", no_drafts)
    found = run(engine)
    assert not found.verdict.holds
    assert found.verdict.text.startswith("nothing was drafted where the tests look")
