"""Acceptance of the tiny family: real weights, fixed prompts, and floors that may only rise.

A floor that is missed is a fault that no token and no error would show: of draft KV, of a head's
conventions, of sampling.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graphengine.bench.acceptance import Acceptance, measure_acceptance
from graphengine.config import CacheConfig, EngineConfig
from graphengine.engine import Engine
from graphengine.sampling.params import SamplingParams
from graphengine.speculative_config import SpeculativeConfig
from tests.acceptance.floors import TINY, hold

HERE = Path(__file__).parent
WEIGHTS = HERE.parent / "weights" / "tiny"
K = 3
NUM_TOKENS = 64


def proposer(name: str) -> dict[str, Any]:
    """Fields of the configuration of a row of the floors."""
    if name in ("ngram", "suffix"):
        return {"method": name}
    method = "eagle" if name.startswith("eagle") else name
    return {"method": method, "model": WEIGHTS / name}


def measure(name: str, temperature: float) -> Acceptance:
    """What the fixed prompts give; sampled requests are drafted for with coupled noise."""
    fields = proposer(name)
    if temperature and "model" in fields:
        fields["draft_sampling"] = "coupled"
    config = EngineConfig(
        max_model_len=512,
        max_num_seqs=5,
        speculative=SpeculativeConfig(max_draft_tokens=K, adaptive=False, **fields),
        cache=CacheConfig(num_blocks=200),
    )
    engine = Engine(WEIGHTS / "target", config)
    assert engine.tokenizer is not None
    texts = json.loads((HERE / "prompts.json").read_text("utf-8"))
    found, _ = measure_acceptance(
        engine,
        [engine.tokenizer.encode(text) for text in texts],
        [
            SamplingParams(
                max_tokens=NUM_TOKENS, temperature=temperature, seed=seed, ignore_eos=True
            )
            for seed in range(len(texts))
        ],
        batch_size=5,
    )
    engine.close()
    return found


@pytest.mark.parametrize(("name", "temperature", "floor"), TINY)
def test_acceptance_is_no_lower_than_its_floor(
    name: str, temperature: float, floor: dict[str, Any]
) -> None:
    hold(measure(name, temperature), floor)
