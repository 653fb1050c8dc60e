"""Acceptance of the tiny family: real weights, fixed prompts, and floors that may only rise.

Counts do not depend on the speed of the machine, so a floor that is missed is a fault: of draft
KV, of a head's conventions, of sampling. `measure` prints what the floors were set from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graphengine.bench.acceptance import Acceptance, measure_acceptance
from graphengine.config import CacheConfig, EngineConfig, SpeculativeConfig
from graphengine.engine import Engine
from graphengine.sampling.params import SamplingParams

HERE = Path(__file__).parent
WEIGHTS = HERE.parent / "weights" / "tiny"
FLOORS: dict[str, dict[str, Any]] = json.loads((HERE / "floors.json").read_text("utf-8"))
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
        speculative=SpeculativeConfig(max_draft_tokens=K, **fields),
        cache=CacheConfig(num_blocks=200),
    )
    engine = Engine(WEIGHTS / "target", config)
    assert engine.tokenizer is not None
    texts = json.loads((HERE / "prompts.json").read_text("utf-8"))
    found = measure_acceptance(
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


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", sorted(FLOORS))
def test_acceptance_is_no_lower_than_its_floor(name: str, temperature: float) -> None:
    """Guards against a loss of acceptance that no token and no error would show."""
    found, floor = measure(name, temperature), FLOORS[name][str(temperature)]
    print(f"{name}, T = {temperature}: {found}")
    assert found.mean_acceptance_length >= floor["mean_acceptance_length"], found
    assert found.rate >= floor["rate"], found
    for place, (share, least) in enumerate(
        zip(found.conditional, floor["conditional"], strict=True)
    ):
        assert share >= least, f"place {place}: {found}"
