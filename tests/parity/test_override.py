"""Overrides: long matches of the text replace a model's drafts, row by row; no token moves."""

from __future__ import annotations

from typing import Any

import pytest

from graphengine.sampling.params import SamplingParams
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Setup

pytestmark = pytest.mark.parity

PROMPTS = [[index + 1] * (index + 1) for index in range(6)]
SETUP = Setup(k=3, max_model_len=128)


def run(checkpoints: Checkpoints, setup: Setup, temperature: float, **options: Any) -> Harness:
    """Text that falls into cycles, whose matches are long and right."""
    target = checkpoints.get("loopy")
    if setup.k:
        options = {"method": "draft_model", "model": str(target), **options}
    harness = Harness(setup.start(target, **options))
    for index, prompt in enumerate(PROMPTS):
        params = SamplingParams(
            max_tokens=50, ignore_eos=True, temperature=temperature * (index % 2), seed=index
        )
        harness.add(f"r{index}", prompt, params)
    harness.drain()
    return harness


@pytest.mark.parametrize("temperature", [0.0, 0.4])
@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_streams_are_those_of_plain_decoding(
    name: str, temperature: float, checkpoints: Checkpoints
) -> None:
    """Guards draft KV behind rows whose drafts were not the model's own."""
    off = run(checkpoints, Setup(max_model_len=128), temperature)
    on = run(checkpoints, SETUP, temperature, override=name, draft_sampling="coupled")
    for index in range(len(PROMPTS)):
        assert on.stream(f"r{index}") == off.stream(f"r{index}")
    stats = on.engine.stats()
    assert stats.eager_fallbacks[f"override:{name}"] > 0
    drafted = sum(n for key, n in stats.replays.items() if key.endswith(":draft"))
    assert 0 < drafted < stats.num_steps, "steps with and without the model"
    for harness in (on, off):
        harness.engine.close()


def test_a_model_is_perfect_wherever_it_is_asked(checkpoints: Checkpoints) -> None:
    """Guards catch-up after rows of another: self-draft misses nothing between the matches."""
    harness = run(checkpoints, SETUP, 0.0, override="ngram", override_min_match=5)
    stats = harness.engine.stats()
    missed = stats.num_draft_tokens - stats.num_accepted_tokens
    assert missed <= 6, "a match may be wrong once in a cycle; the model never is"
    harness.engine.close()


def test_a_replaced_row_was_certain(checkpoints: Checkpoints) -> None:
    """Guards the distribution of drafts that the model has not drawn."""
    harness = run(
        checkpoints,
        Setup(k=3, max_model_len=128, verification="rejection"),
        0.4,
        override="ngram",
        override_min_match=2,
        draft_sampling="probabilistic",
    )
    off = run(checkpoints, Setup(max_model_len=128), 0.0)
    for index in range(0, len(PROMPTS), 2):  # greedy requests are identical in either mode
        assert harness.stream(f"r{index}") == off.stream(f"r{index}")
    for one in (harness, off):
        one.engine.close()
