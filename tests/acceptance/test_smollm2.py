"""Acceptance on the real model: EAGLE-3 on chat, matching proposers on copies; slow."""

from __future__ import annotations

import pytest

from graphengine import LLM, SamplingParams, SpeculativeConfig
from graphengine.bench.acceptance import Acceptance, measure_acceptance
from graphengine.bench.workloads import encode, load_all
from graphengine.models.locate import DEMO_MODEL
from profiles.acceptance import FILES

pytestmark = pytest.mark.slow


def measure(speculative: SpeculativeConfig, workload: str, temperature: float) -> Acceptance:
    prompts = load_all(FILES)[workload]
    with LLM(DEMO_MODEL, max_num_seqs=8, max_model_len=2048, speculative=speculative) as llm:
        return measure_acceptance(
            llm.engine,
            [encode(llm.tokenizer, prompt) for prompt in prompts],
            [
                SamplingParams(max_tokens=128, temperature=temperature, seed=seed)
                for seed in range(len(prompts))
            ],
            batch_size=8,
        )


@pytest.mark.parametrize(("temperature", "least"), [(0.0, 1.8), (0.7, 1.6)])
def test_eagle3_on_chat_prompts_held_out_from_training(temperature: float, least: float) -> None:
    """The head that is shipped; coupled drafts where tokens are sampled."""
    found = measure(
        SpeculativeConfig(
            "eagle",
            model="smollm2-135m-eagle3",
            max_draft_tokens=3,
            draft_sampling="coupled" if temperature else "greedy",
        ),
        "chat",
        temperature,
    )
    print(found)
    assert found.mean_acceptance_length >= least, found
    assert all(share > 0.4 for share in found.conditional), found


@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_matching_proposers_on_copies(name: str) -> None:
    found = measure(SpeculativeConfig(name, max_draft_tokens=6), "copy_edit", 0.0)
    print(found)
    assert found.mean_acceptance_length >= 2.5, found
