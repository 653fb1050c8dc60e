"""Families of multi-token-prediction layers, told by names; what is refused, by which tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from proposers.checkpoint import DraftCheckpoint
from proposers.mtp_config import FAMILIES, MtpConfig, read_mtp_config
from tests.mtp_checkpoints import FORMS, make_layers, stored

FAMILY_OF = {
    "mimo": "MiMo",
    "deepseek": "DeepSeek",
    "mimo_v2": "MiMo-V2",
    "qwen3_next": "Qwen3-Next",
    "speculators": "speculators",
}
BLOCK = {
    f"model.layers.1.{name}.weight": torch.zeros(4, 4)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.down_proj")
}
TARGET = {
    "model.embed_tokens.weight": torch.zeros(9, 4),
    "model.norm.weight": torch.zeros(4),
    "model.layers.1.input_layernorm.weight": torch.zeros(4),
    **BLOCK,
}


def checkpoint(names: Any, **config: Any) -> DraftCheckpoint:
    """One of which there are only headers."""

    def read(name: str) -> torch.Tensor:
        raise AssertionError(f"{name} is read")

    return DraftCheckpoint(
        Path("here"), config, dict.fromkeys(names, (4,)), dict.fromkeys(names, "F32"), read
    )


def names(family: str, num_layers: int = 1, first: int = 2, *, copies: bool = False) -> set[str]:
    layers = make_layers(TARGET, num_layers, copies=copies)
    return set(stored(FORMS[family], layers, first if family == "deepseek" else 0))


def read(found: set[str], num_layers: int | None = 2, **config: Any) -> MtpConfig:
    return read_mtp_config(checkpoint({*TARGET, *found}, **config), num_layers=num_layers)


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("family", FORMS)
def test_every_family_is_told_by_its_names(family: str, num_layers: int) -> None:
    """Guards each name, and each thing in which the families differ."""
    form, found = FORMS[family], names(family, num_layers)
    config = read(found, num_nextn_predict_layers=num_layers)
    assert config.family.name == FAMILY_OF[family]
    assert config.num_layers == num_layers
    assert not config.has_embedding
    assert not config.has_head
    assert config.family.hidden_first == form.hidden_first
    assert config.family.norms_add_one == form.adds_one
    assert config.family.zero_first == form.zero_first
    assert {name for name in (*TARGET, *found) if config.owns(name)} == found
    parts = (config.family.embed_norm, config.family.hidden_norm)
    parts += (config.family.projection, config.family.final_norm)
    block = [name.removeprefix("model.layers.1.") for name in BLOCK]
    block += ["input_layernorm.weight"]
    wanted = {config.outer(depth, part) for part in parts for depth in range(num_layers)}
    wanted |= {config.block(depth, part) for part in block for depth in range(num_layers)}
    assert wanted == found
    renamed = config.block(0, "post_attention_layernorm.weight").rsplit(".", 2)[1]
    default = "post_attention_layernorm"
    assert renamed == form.renamed.get(f"{default}.weight", default).removesuffix(".weight")


def test_the_table_of_these_tests_is_whole() -> None:
    assert set(FAMILY_OF.values()) == {family.name for family in FAMILIES}


@pytest.mark.parametrize("family", ["deepseek", "speculators"])
def test_copies_are_seen(family: str) -> None:
    config = read(names(family, 2, copies=True))
    assert (config.has_embedding, config.has_head) == (True, True)
    assert {config.embedding(1), config.head(1)} <= names(family, 2, copies=True)


def test_deepseek_s_count_on_behind_the_target_s() -> None:
    """Guards another layer that is taken for the first prediction layer."""
    assert read(names("deepseek", 2)).indices == (2, 3)
    assert read(names("deepseek", 2, first=61), None).indices == (61, 62)
    with pytest.raises(ValueError, match=r"\(DeepSeek\) are \[3\]; expected all from 2 on"):
        read(names("deepseek", first=3))


def test_gaps_are_refused() -> None:
    found = {name for name in names("mimo", 3) if ".1." not in name}
    with pytest.raises(ValueError, match=r"\(MiMo\) are \[0, 2\]; expected all from 0 on"):
        read(found)


def test_two_families_are_refused() -> None:
    with pytest.raises(ValueError, match="of two families, MiMo and Qwen3-Next"):
        read(names("mimo") | names("qwen3_next"))


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "mtp_num_hidden_layers"])
def test_the_config_s_count_is_held_to_the_weights(key: str) -> None:
    with pytest.raises(ValueError, match=f"config.json says {key}=3, the weights have 1 such"):
        read(names("mimo"), **{key: 3})
    assert read(names("mimo"), **{key: None}).num_layers == 1


def test_nothing_there_says_what_is_looked_for() -> None:
    with pytest.raises(ValueError, match=r"known are model\.mtp_layers\.\{\}\.input_proj, model"):
        read(set())
    with pytest.raises(ValueError, match="speculators_model_type is 'eagle3': use that proposer"):
        read({"fc.weight", "layers.0.hidden_norm.weight"}, speculators_model_type="eagle3")


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("mlp.experts.0.up_proj.weight", "a mixture of experts"),
        ("mlp.experts.gate_up_proj", "a mixture of experts"),
        ("mlp.gate.weight", "a mixture of experts"),
        ("mlp.shared_experts.up_proj.weight", "a mixture of experts"),
        ("mlp.shared_expert_gate.weight", "a mixture of experts"),
        ("block_sparse_moe.gate.weight", "a mixture of experts"),
        ("self_attn.kv_a_proj_with_mqa.weight", r"multi-head latent attention \(MLA\)"),
        ("self_attn.q_a_proj.weight", r"multi-head latent attention \(MLA\)"),
        ("self_attn.kv_b_proj.weight", r"multi-head latent attention \(MLA\)"),
        ("linear_attn.in_proj_qkvz.weight", "linear attention"),
        ("self_attn.attention_sink_bias", "attention sinks"),
        ("mlp.up_proj.weight_scale_inv", "quantised weights"),
        ("mlp.up_proj.qweight", "quantised weights"),
    ],
)
@pytest.mark.parametrize("family", FORMS)
def test_blocks_that_are_not_dense_are_refused_by_name(
    family: str, part: str, message: str
) -> None:
    """Guards an error about shapes where the architecture is what does not fit."""
    name = f"{FORMS[family].prefix}{part}".format(2 if family == "deepseek" else 0)
    with pytest.raises(ValueError, match=f"{part} shows {message} .* or the proposers eagle or"):
        read(names(family) | {name})


def test_blocks_of_the_target_are_its_own_business() -> None:
    assert read(names("mimo") | {"model.layers.1.mlp.experts.0.up_proj.weight"}).num_layers == 1
