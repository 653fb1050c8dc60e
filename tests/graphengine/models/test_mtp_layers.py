"""Checkpoints that carry layers for multi-token prediction: which tensors are theirs, by config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from graphengine.models.decoder import DecoderWeights
from graphengine.models.hf_config import read_hf_config
from graphengine.models.loader import load_weights, open_model
from tests.mtp_checkpoints import FORMS, SINGLE_FILE, make_mtp, write

COUNT = "num_nextn_predict_layers"


def load(directory: Path) -> DecoderWeights:
    opened = open_model(directory)
    weights = DecoderWeights.allocate(opened.config, torch.float32, torch.device("cpu"))
    load_weights(weights.destinations(opened.config), opened.source, config=opened.config)
    return weights


def change(directory: Path, **config: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))


@pytest.mark.parametrize("family", [name for name in FORMS if name != "speculators"])
def test_the_model_is_loaded_without_them(family: str, tmp_path: Path) -> None:
    """Guards a target that is refused for what it does not need."""
    target = make_mtp(tmp_path, family, num_layers=2, copies=family == "deepseek").target
    assert open_model(target).config.num_mtp_layers == 2
    stored = load_file(target / SINGLE_FILE)
    weights = load(target)
    assert torch.equal(weights.final_norm, stored["model.norm.weight"])
    assert len(weights.layers) == 2
    assert torch.equal(weights.layers[1].down, stored["model.layers.1.mlp.down_proj.weight"])


@pytest.mark.parametrize("family", [name for name in FORMS if name != "speculators"])
@pytest.mark.parametrize("said", [0, 1])
def test_layers_that_the_config_does_not_know_have_no_place(
    family: str, said: int, tmp_path: Path
) -> None:
    """Guards a rule by names alone, behind which any tensor could hide."""
    target = make_mtp(tmp_path, family, num_layers=2).target
    change(target, num_nextn_predict_layers=said, mtp_num_hidden_layers=said)
    with pytest.raises(ValueError, match="has no place for"):
        load(target)


def test_an_ordinary_layer_behind_the_last_is_a_mistake(tmp_path: Path) -> None:
    """Guards a num_hidden_layers that is too small: the model would lose a layer and not say so."""
    target = make_mtp(tmp_path, "mimo").target
    change(target, num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"has no place for: model\.layers\.1\."):
        load(target)


def test_other_unknown_tensors_still_have_no_place(tmp_path: Path) -> None:
    target = make_mtp(tmp_path, "mimo").target
    config, weights = (
        json.loads((target / "config.json").read_text()),
        load_file(target / SINGLE_FILE),
    )
    write(target, config, weights | {"model.mtp_surprise.0.weight": torch.ones(1)})
    with pytest.raises(ValueError, match=r"no place for: model\.mtp_surprise"):
        load(target)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({COUNT: -1}, f"{COUNT} must be 0 or a positive integer, got -1"),
        ({COUNT: True}, f"{COUNT} must be 0 or a positive integer, got True"),
        ({"mtp_num_hidden_layers": 1.5}, "mtp_num_hidden_layers must be"),
        ({COUNT: 1, "mtp_num_hidden_layers": 2}, "disagree"),
    ],
)
def test_counts_are_checked(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_hf_config(MIMO | keys)


MIMO = {
    "architectures": ["MiMoForCausalLM"],
    "attention_bias": True,
    "auto_map": {
        "AutoConfig": "configuration_mimo.MiMoConfig",
        "AutoModel": "modeling_mimo.MiMoModel",
        "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM",
    },
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 32768,
    "max_window_layers": 36,
    "model_type": "mimo",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 640000,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151680,
}


def test_a_published_mimo_config_is_read() -> None:
    """Guards MiMo-7B, whose class is published as code beside the weights."""
    config = read_hf_config(MIMO)
    assert (config.qkv_bias, config.o_bias, config.qk_norm) == (True, False, False)
    assert (config.num_mtp_layers, config.sliding_window) == (1, None)
    assert (config.rope.theta, config.head_dim, config.num_kv_heads) == (640000, 128, 8)
    from_hub = {"AutoModelForCausalLM": "XiaomiMiMo/MiMo-7B-RL--modeling_mimo.MiMoForCausalLM"}
    assert read_hf_config(MIMO | {"auto_map": from_hub}) == config


@pytest.mark.parametrize(
    "code", ["modeling_mimo.MiMoModel", "modeling_mimo_v2.MiMoForCausalLM", "MiMoForCausalLM", 3]
)
def test_other_code_is_refused(code: object) -> None:
    """Guards a fine-tune whose own code is another model's."""
    with pytest.raises(ValueError, match=r"auto_map=.* which is never run"):
        read_hf_config(MIMO | {"auto_map": {"AutoModelForCausalLM": code}})
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    with pytest.raises(ValueError, match="auto_map="):
        read_hf_config(MIMO | llama)
