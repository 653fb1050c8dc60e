"""The check of drafts at load: who is refused, who passes, and that it leaves no trace."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from graphengine import self_check
from graphengine.engine import Engine
from graphengine.sampling.params import SamplingParams
from graphengine.self_check import Acceptance
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.setups import Setup

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


def start(checkpoints: Checkpoints, draft: str, **options: Any) -> Engine:
    """An engine for the llama checkpoint, drafted for by another one."""
    model = str(checkpoints.get(draft))
    options = {"self_check": "error", **options}
    return Setup(k=3).start(checkpoints.get(), method="draft_model", model=model, **options)


def test_a_model_of_another_target_is_refused(checkpoints: Checkpoints) -> None:
    """Guards a draft that runs, costs and accepts nothing; the message says what to suspect."""
    with pytest.raises(ValueError, match=r"self_check: proposer 'draft_model' with model .*qwen3"):
        start(checkpoints, "qwen3")


def test_a_warning_instead(checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        start(checkpoints, "qwen3", self_check="warn").close()
    assert "first drafts of a greedy text" in caplog.text


def test_off_costs_nothing(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(self_check, "measure")
    engine = start(checkpoints, "qwen3", self_check="off")
    assert "self-check" not in engine.start_times.seconds
    engine.close()


def test_a_good_one_passes_and_nothing_is_left(checkpoints: Checkpoints) -> None:
    """Guards counters, cache, seeds and draft limit, all of which the check has moved."""
    checked, plain = start(checkpoints, "llama"), start(checkpoints, "llama", self_check="off")
    assert checked.start_times.seconds["self-check"] > 0
    stats = checked.stats()
    assert not stats.replays
    assert not stats.eager_fallbacks
    assert (stats.num_steps, stats.padding_rows, stats.kv_blocks_cached) == (0, 0, 0)
    assert checked.draft_limit == 3
    streams = []
    for engine in (checked, plain):
        params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0)  # a drawn seed
        engine.add_request("one", [5, 6, 7], params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
        streams.append(outputs[-1].outputs[0].token_ids)
        engine.close()
    assert streams[0] == streams[1]


def test_short_contexts_are_too_little_to_judge(checkpoints: Checkpoints) -> None:
    model = str(checkpoints.get("qwen3"))
    setup = Setup(k=3, max_model_len=12)
    options = {"method": "draft_model", "model": model, "self_check": "error"}
    setup.start(checkpoints.get(), **options).close()


def test_pools_smaller_than_a_context_are_no_fault(checkpoints: Checkpoints) -> None:
    """Guards a start that is refused for the sake of its own check."""
    model = str(checkpoints.get())
    for num_blocks in (2, 4, 15):
        setup = Setup(k=3, num_blocks=num_blocks)
        setup.start(checkpoints.get(), method="draft_model", model=model).close()


@pytest.mark.parametrize(
    ("places", "share", "chance", "near"),
    [(64, 0.02, 0.05, True), (64, 0.2, 0.25, True), (64, 0.3, 0.25, False), (9, 0.0, 0.05, False)],
)
def test_what_is_near_chance(places: int, share: float, chance: float, near: bool) -> None:
    assert Acceptance(places, share, chance).is_near_chance is near
