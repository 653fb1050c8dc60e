"""Acceptance on the real model: EAGLE-3 on chat, matching proposers on copies; slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from graphengine import LLM, SamplingParams, SpeculativeConfig
from graphengine.bench.acceptance import measure_acceptance
from graphengine.bench.workloads import encode, load_all
from graphengine.models.locate import DEMO_MODEL
from profiles.acceptance import FILES
from tests.acceptance.floors import SMOLLM2, hold

pytestmark = pytest.mark.slow

EAGLE: Mapping[str, Any] = {
    "method": "eagle",
    "model": "smollm2-135m-eagle3",
    "max_draft_tokens": 3,
}
PROPOSERS: Mapping[str, Mapping[str, Any]] = {
    "eagle": EAGLE,
    "eagle, coupled": {**EAGLE, "draft_sampling": "coupled"},
    "ngram": {"method": "ngram", "max_draft_tokens": 6},
    "suffix": {"method": "suffix", "max_draft_tokens": 6, "shared_tree_tokens": 0},
}


@pytest.mark.parametrize("cell", SMOLLM2, ids=lambda cell: "-".join(map(str, cell[:3])))
def test_acceptance_is_no_lower_than_its_floor(cell: Sequence[Any]) -> None:
    """Prompts that no training has seen; counts, so that the speed of the machine is nothing."""
    name, workload, temperature, floor = cell
    prompts = load_all(FILES)[workload]
    speculative = SpeculativeConfig(**PROPOSERS[name], adaptive=False)
    with LLM(DEMO_MODEL, max_num_seqs=8, max_model_len=2048, speculative=speculative) as llm:
        found, _ = measure_acceptance(
            llm.engine,
            [encode(llm.tokenizer, prompt) for prompt in prompts],
            [
                SamplingParams(max_tokens=128, temperature=temperature, seed=seed)
                for seed in range(len(prompts))
            ],
            batch_size=8,
        )
    hold(found, floor)
