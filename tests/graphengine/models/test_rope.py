"""Rotary tables against transformers, bit for bit."""

from typing import Any

import pytest
import torch

from graphengine.models.hf_config import read_hf_config
from graphengine.models.rope import rope_tables
from tests.tiny import ROPES, make_model

VARIANTS: dict[str, dict[str, Any]] = {
    **ROPES,
    "big-theta": {"rope_type": "default", "rope_theta": 1000000.0},
    "yarn-mscale": {**ROPES["yarn"], "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn-attention-factor": {**ROPES["yarn"], "attention_factor": 0.7},
    "yarn-betas": {**ROPES["yarn"], "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-no-truncate": {**ROPES["yarn"], "truncate": False},
    "yarn-no-original": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0},
    "llama3-real": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


@pytest.mark.parity
@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize("variant", VARIANTS)
def test_tables_equal_transformers_bit_for_bit(variant: str, head_dim: int) -> None:
    """Guards fp32 parity: one unit in the last place of a cosine is enough to flip a near-tie."""
    model = make_model("llama", rope_parameters=dict(VARIANTS[variant]), head_dim=head_dim)
    raw = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    cos, sin = rope_tables(read_hf_config(raw), 3000)
    theirs = model.model.rotary_emb(torch.zeros(1), torch.arange(3000)[None])
    for ours, reference in zip((cos, sin), theirs, strict=True):
        assert ours.dtype == torch.float32
        assert ours.shape == (3000, head_dim // 2)
        assert torch.equal(torch.cat((ours, ours), dim=-1), reference[0])


def test_every_kind_gives_other_tables() -> None:
    """Guards the test above against comparing the same formula under several names."""
    tables = []
    for rope in ROPES.values():
        raw = make_model("llama", rope_parameters=dict(rope)).config.to_dict()
        tables.append(
            rope_tables(read_hf_config({**raw, "architectures": ["LlamaForCausalLM"]}), 9)
        )
    for i, (cos, _) in enumerate(tables):
        assert not any(torch.equal(cos, other) for other, _ in tables[:i])
