"""draft_sampling="coupled" through the engine: the same tokens, accepted more often.

Also the self-draft: a proposer that has the target's own logits. Whatever is wrong with positions,
noise or processors on one side shows as an acceptance below 100 %.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from graphengine.engine import Engine
from graphengine.sampling.params import SamplingParams
from proposers.base import FloatArray, TokenArray
from proposers.mock_drawn import Logits
from tests.graphengine.engine.setups import Setup
from tests.tiny import make_checkpoint

pytestmark = pytest.mark.parity

PROMPTS = {"a": [5, 6, 7, 5], "b": [200, 3, 3], "c": list(range(20, 33)), "d": [9]}
SETUP = Setup(k=3, max_model_len=128)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("coupled") / "model")


class TargetLogits:
    """The target's own logits after any history, by an engine that does not speculate."""

    def __init__(self, checkpoint: Path) -> None:
        self._engine = Setup(max_model_len=128, max_num_seqs=1).start(checkpoint)
        self._key = self._engine.runner.manager.dispatch(1, 0, "greedy")
        self._known: dict[bytes, FloatArray] = {}

    def __call__(self, history: TokenArray) -> FloatArray:
        key = history.tobytes()
        if key not in self._known:
            self._engine.add_request("a", history.tolist(), SamplingParams(max_tokens=1))
            while self._engine.has_unfinished_requests():
                self._engine.step()
            logits = self._engine.runner.last_logits(self._key)[0, 0]
            self._known[key] = logits.double().numpy().copy()
        return self._known[key]


def params(index: int, temperature: float) -> SamplingParams:
    return SamplingParams(max_tokens=30, ignore_eos=True, temperature=temperature, seed=index)


def streams(engine: Engine, temperature: float) -> dict[str, list[int]]:
    found = {}
    for index, (name, prompt) in enumerate(PROMPTS.items()):
        engine.add_request(name, prompt, params(index, temperature))
    while engine.has_unfinished_requests():
        found.update({o.request_id: o.outputs[0].token_ids for o in engine.step()})
    return found


def start(checkpoint: Path, draft_sampling: str, logits: Logits, **options: str) -> Engine:
    return SETUP.start(
        checkpoint, method="mock-drawn", draft_sampling=draft_sampling, logits=logits, **options
    )


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
def test_self_draft_is_always_accepted(checkpoint: Path, temperature: float) -> None:
    """Noise of another position, stream or choice than the target's; wrong temperature."""
    logits = TargetLogits(checkpoint)
    engine = start(checkpoint, "coupled", logits)
    got = streams(engine, temperature)
    stats = engine.stats()
    assert stats.num_draft_tokens > 50
    assert stats.num_accepted_tokens == stats.num_draft_tokens
    engine.close()
    plain = Setup(max_model_len=128).start(checkpoint)
    assert got == streams(plain, temperature)
    plain.close()


def test_self_draft_is_always_accepted_by_rejection(checkpoint: Path) -> None:
    """p == q, and a draft is rejected: q is not the p that the verifier has."""
    engine = start(checkpoint, "probabilistic", TargetLogits(checkpoint), verification="rejection")
    streams(engine, 0.9)
    stats = engine.stats()
    assert stats.num_draft_tokens > 50
    # q is rounded to fp32 and p is not: a hair's breadth of rejections may remain.
    assert stats.num_accepted_tokens >= stats.num_draft_tokens - 1
    engine.close()


def test_coupled_drafts_are_accepted_more_often(checkpoint: Path) -> None:
    """A coupling that changes the output, or is none."""
    target = TargetLogits(checkpoint)

    def rough(history: TokenArray) -> FloatArray:
        found: FloatArray = target(history) + np.random.default_rng(len(history)).normal(size=264)
        return found

    accepted, outputs = {}, []
    for kind in ("greedy", "coupled"):
        engine = start(checkpoint, kind, rough)
        outputs.append(streams(engine, 1.0))
        accepted[kind] = engine.stats().acceptance_rate
        engine.close()
    assert outputs[0] == outputs[1]
    assert accepted["coupled"] > accepted["greedy"] + 0.1
