"""Model configs: defaults and values as transformers reads them, refusals by name."""

import contextlib
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from graphengine.models.config import ModelConfig, RopeConfig
from graphengine.models.hf_config import read_hf_config
from tests.tiny import ARCHITECTURES, ROPES, make_model

MINIMAL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
}


MORE_KEYS = (
    "attention_bias",
    "auto_map",
    "dtype",
    "eos_token_id",
    "hidden_act",
    "layer_types",
    "max_position_embeddings",
    "max_window_layers",
    "num_local_experts",
    "original_max_position_embeddings",
    "quantization_config",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "torch_dtype",
    "use_sliding_window",
)
# What JSON can hold instead of what is meant.
ODD = (None, True, -1, 0, 1.5, float("nan"), "x", [], [1], ["x"], [[1]], {}, {"x": [1]})


def raw_config(arch: str = "llama", **changes: Any) -> dict[str, Any]:
    return {
        **MINIMAL,
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "num_key_value_heads": 8,
        "head_dim": 16,
        **changes,
    }


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_absent_keys_mean_what_transformers_means(arch: str, tmp_path: Path) -> None:
    """Guards a default that differs from the reference: it loads, then answers wrongly."""
    raw = {**MINIMAL, "architectures": [ARCHITECTURES[arch]], "model_type": arch}
    if arch != "qwen3":  # its class has a default head size
        raw["head_dim"] = 16
    (tmp_path / "config.json").write_text(json.dumps(raw))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    ours = read_hf_config(raw)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == theirs.head_dim
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert list(ours.eos_token_ids) == (
        [] if theirs.eos_token_id is None else [theirs.eos_token_id]
    )
    assert ours.sliding_window == (4096 if arch == "mistral" else None)


@pytest.mark.parametrize(
    ("arch", "attention_bias"),
    [*((arch, False) for arch in ARCHITECTURES), ("llama", True), ("qwen3", True)],
)
def test_biases_and_norms_are_those_of_the_real_model(arch: str, attention_bias: bool) -> None:
    """Guards a bias flag read for a class that fixes it, or the other way round."""
    extra = {"attention_bias": True} if attention_bias else {}
    model = make_model(arch, **extra)
    config = read_hf_config({**model.config.to_dict(), "architectures": [ARCHITECTURES[arch]]})
    layer = model.model.layers[0]
    assert config.qkv_bias == (layer.self_attn.q_proj.bias is not None)
    assert config.o_bias == (layer.self_attn.o_proj.bias is not None)
    assert config.mlp_bias == (layer.mlp.up_proj.bias is not None)
    assert config.qk_norm == hasattr(layer.self_attn, "q_norm")


@pytest.mark.parametrize("kind", ROPES)
def test_old_and_new_rope_spellings_agree(kind: str) -> None:
    """Guards transformers-4 checkpoints, whose theta sits beside rope_scaling."""
    new = read_hf_config(raw_config(rope_parameters=ROPES[kind]))
    old = {k: v for k, v in ROPES[kind].items() if k not in ("rope_theta", "rope_type")}
    scaling = None if kind == "default" else {**old, "type": kind}
    assert read_hf_config(raw_config(rope_scaling=scaling, rope_theta=10000.0)).rope == new.rope
    assert new.rope.kind == kind


def test_original_length_falls_back_and_yields_as_in_transformers() -> None:
    """Guards yarn configs without the key, and Phi-style ones that have it at the top level."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}
    inner = {**yarn, "original_max_position_embeddings": 64}
    original = "original_max_position_embeddings"
    rope = read_hf_config(raw_config(rope_parameters=yarn, max_position_embeddings=128)).rope
    assert rope.original_max_position_embeddings == 128
    rope = read_hf_config(raw_config(rope_parameters=inner, **{original: 32})).rope
    assert rope.original_max_position_embeddings == 32


@pytest.mark.parametrize(
    ("changes", "needle"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ({"architectures": None, "model_type": "gemma"}, "gemma"),
        ({"model_type": "qwen2"}, "contradicts"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_interleaved": True}, "rope_interleaved=True"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"num_local_experts": 8}, "num_local_experts=8"),
        ({"auto_map": {"AutoModelForCausalLM": "m.Model"}}, "auto_map"),
        ({"is_causal": False}, "is_causal=False"),
        ({"sliding_window": 16}, "sliding_window=16"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "'longrope'.*default, linear"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]}}, "mrope_section"),
        ({"rope_scaling": {"type": "linear"}}, "needs factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "spin": 1}}, "spin"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "disagree"),
        (
            {"rope_parameters": {**ROPES["llama3"], "high_freq_factor": 1.0}},
            "high_freq_factor .* greater than low_freq_factor",
        ),
        ({"rope_parameters": {**ROPES["yarn"], "beta_fast": 0.5}}, "beta_fast"),
        ({"num_key_value_heads": 5}, "multiple of num_kv_heads"),
        ({"head_dim": 12}, "multiple of 8"),
        ({"head_dim": None, "hidden_size": 65}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"eos_token_id": 300}, "eos_token_ids holds 300"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict[str, Any], needle: str) -> None:
    """Guards a setting that is silently ignored: wrong text instead of an error."""
    with pytest.raises(ValueError, match=needle):
        read_hf_config(raw_config(**changes))


@pytest.mark.parametrize(
    ("arch", "key", "value"),
    [
        ("mistral", "attention_bias", True),
        ("qwen2", "attention_bias", False),
        ("mistral", "mlp_bias", True),
        ("qwen3", "mlp_bias", True),
    ],
)
def test_biases_that_a_class_fixes_cannot_be_changed(arch: str, key: str, value: bool) -> None:
    """Guards a bias setting of one class in the config of another, where nothing reads it."""
    with pytest.raises(ValueError, match=f"{key}={value} contradicts"):
        read_hf_config(raw_config(arch, **{key: value}))
    assert read_hf_config(raw_config(arch, **{key: not value})) == read_hf_config(raw_config(arch))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("where", ["", "rope_parameters", "rope_scaling"])
def test_a_value_of_another_kind_is_read_or_refused(arch: str, where: str) -> None:
    """Guards a TypeError from inside for any key whose value is a list, an object or a text."""
    rope = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0, "truncate": True}
    more = {where: rope} if where else dict.fromkeys(MORE_KEYS)
    for key, odd in itertools.product(rope if where else raw_config(**more), ODD):
        raw = raw_config(arch, **{name: dict(value or {}) or None for name, value in more.items()})
        (raw[where] if where else raw)[key] = odd
        with contextlib.suppress(ValueError):
            assert isinstance(read_hf_config(raw, generation={key: odd}), ModelConfig)


def test_inert_values_are_accepted() -> None:
    """Guards real checkpoints that spell out settings which do nothing."""
    inert = {
        "rope_interleaved": False,
        "partial_rotary_factor": 1.0,
        "hidden_act": "silu",
        "quantization_config": None,
        "pretraining_tp": 1,
        "is_llama_config": True,
        "rope_scaling": None,
        "num_local_experts": 0,
        "attention_dropout": 0.0,
    }
    assert read_hf_config(raw_config(**inert)) == read_hf_config(raw_config())


@pytest.mark.parametrize(
    ("arch", "changes", "expected"),
    [
        ("mistral", {"sliding_window": 16}, 16),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {"sliding_window": 4096, "max_position_embeddings": 4096}, None),
        ("qwen2", {"sliding_window": 16}, None),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2}, None),
        ("qwen3", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0}, 16),
        (
            "qwen3",
            {
                "sliding_window": 16,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention"] * 2,
            },
            16,
        ),
    ],
)
def test_sliding_window_only_where_it_acts(
    arch: str, changes: dict[str, Any], expected: int | None
) -> None:
    """Guards a window that is applied though switched off, or dropped though on."""
    assert read_hf_config(raw_config(arch, **changes)).sliding_window == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": True, "max_window_layers": 1},
        {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
        {"use_sliding_window": True, "layer_types": ["full_attention"]},
        {"layer_types": ["sliding_attention"] * 2},
        {"use_sliding_window": True, "sliding_window": 0},
    ],
)
def test_windows_that_differ_between_layers_are_refused(changes: dict[str, Any]) -> None:
    """Guards one window being applied to layers that have none."""
    with pytest.raises(ValueError, match=r"layer_types|sliding_window"):
        read_hf_config(raw_config("qwen2", **{"sliding_window": 16, **changes}))


def test_eos_ids_of_both_files_are_merged() -> None:
    """Guards chat models whose end-of-turn id is only in generation_config.json."""
    config = read_hf_config(raw_config(eos_token_id=7), generation={"eos_token_id": [9, 7]})
    assert config.eos_token_ids == (7, 9)
    assert read_hf_config(raw_config("qwen2"), generation={}).eos_token_ids == ()


def test_dtype_of_either_spelling_or_of_the_weights() -> None:
    """Guards new checkpoints, which write `dtype` for `torch_dtype`."""
    assert read_hf_config(raw_config(torch_dtype="bfloat16")).dtype == torch.bfloat16
    assert read_hf_config(raw_config(dtype="float16")).dtype == torch.float16
    assert read_hf_config(raw_config(), fallback_dtype=torch.bfloat16).dtype == torch.bfloat16


def test_derived_sizes_and_self_check() -> None:
    """Guards configs that are built by hand rather than read."""
    config = read_hf_config(raw_config())
    assert (config.q_size, config.kv_size) == (32 * 16, 8 * 16)
    for field, value in (("num_kv_heads", 3), ("sliding_window", 10**6), ("head_dim", -8)):
        with pytest.raises(ValueError, match=field):
            replace(config, **{field: value})
    assert isinstance(config, ModelConfig)
    with pytest.raises(ValueError, match="kind"):
        RopeConfig(kind="longrope")
