"""From the contents of a Hugging Face config.json to a `ModelConfig`.

Reads both spellings of the rotary settings (`rope_theta` + `rope_scaling`, and `rope_parameters`).
A setting that is known to change the arithmetic and that the decoder does not implement is refused
by name and value. Other keys are ignored, as config.json is an open format and most of them mean
nothing here. Knows nothing of files: it gets parsed JSON.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch

from graphengine.models.config import ModelConfig
from graphengine.models.hf_rope import read_rope
from graphengine.models.registry import (
    ARCHITECTURES,
    COMMON_DEFAULTS,
    Architecture,
    find_architecture,
)
from graphengine.models.values import Values

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

# Settings that change the arithmetic, and the values under which they do nothing. Null always
# passes.
_INERT_VALUES: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("silu", "swish"),
    "quantization_config": (),
    "compression_config": (),
    "partial_rotary_factor": (1, 1.0),
    "rotary_pct": (1, 1.0),
    "rope_interleaved": (False,),
    "rope_interleave": (False,),
    "use_rope": (True,),
    "no_rope_layers": ([],),
    "no_rope_layer_interval": (0,),
    "position_embedding_type": ("rope", "rotary"),
    "alibi": (False,),
    "logit_scale": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "attention_multiplier": (),
    "query_pre_attn_scalar": (),
    "clip_qkv": (),
    "qk_layernorm": (False,),
    "use_qk_norm": (False,),
    "qkv_bias": (False,),
    "attention_chunk_size": (),
    "attn_temperature_tuning": (False, 0),
    "attention_sink": (False,),
    "use_mrope": (False,),
    "mrope_section": (),
    "is_causal": (True,),
    "use_bidirectional_attention": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "text_config": (),
    "vision_config": (),
}
# How many layers for multi-token prediction the checkpoint has beside the model's own.
_MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
# Families of settings that only models of another kind have, whatever each is called.
_FOREIGN_KEY = re.compile(r"expert|moe(_|$)|softcap|shared_kv|kv_lora|q_lora")


def read_hf_config(
    raw: Mapping[str, Any],
    *,
    generation: Mapping[str, Any] | None = None,
    fallback_dtype: torch.dtype = torch.float32,
) -> ModelConfig:
    """Build the model's config.

    Args:
        raw: Contents of config.json.
        generation: Contents of generation_config.json, whose end-of-text ids are added.
        fallback_dtype: The dtype where config.json names none.

    Raises:
        ValueError: An unknown architecture, a missing or malformed value, or a setting that the
            decoder does not implement; the message names key, value and what is allowed.
    """
    arch = _architecture(raw)
    _refuse_unsupported(raw, arch)
    values = Values("config.json", raw, defaults={**COMMON_DEFAULTS, **arch.defaults})
    num_heads = values.count("num_attention_heads")
    hidden_size = values.count("hidden_size")
    num_layers = values.count("num_hidden_layers")
    max_positions = values.count("max_position_embeddings")
    attention_bias = values.flag("attention_bias")
    return ModelConfig(
        architecture=arch.name,
        vocab_size=values.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=values.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=values.count("num_key_value_heads", null_means=num_heads),
        head_dim=_head_dim(values, hidden_size, num_heads),
        rms_norm_eps=values.number("rms_norm_eps"),
        rope=read_rope(raw, default_theta=values.number("rope_theta"), max_positions=max_positions),
        max_position_embeddings=max_positions,
        tie_word_embeddings=values.flag("tie_word_embeddings"),
        qkv_bias=attention_bias if arch.qkv_bias is None else arch.qkv_bias,
        o_bias=attention_bias if arch.o_bias is None else arch.o_bias,
        mlp_bias=arch.has_mlp_bias and values.flag("mlp_bias"),
        qk_norm=arch.qk_norm,
        sliding_window=_sliding_window(values, arch, num_layers, max_positions),
        eos_token_ids=_eos_ids(values.get("eos_token_id"), (generation or {}).get("eos_token_id")),
        dtype=_dtype(raw, fallback_dtype),
        num_mtp_layers=_num_mtp_layers(raw),
    )


def _architecture(raw: Mapping[str, Any]) -> Architecture:
    names = raw.get("architectures")
    model_type = raw.get("model_type")
    if names is None:
        by_type = {row.model_type: row for row in ARCHITECTURES.values()}
        if not isinstance(model_type, str) or model_type not in by_type:
            raise ValueError(
                f"config.json has no architectures and model_type {model_type!r} is not supported; "
                f"supported: {', '.join(by_type)}"
            )
        return by_type[model_type]
    if not isinstance(names, list) or len(names) != 1:
        raise ValueError(f"config.json: architectures must list one class name, got {names!r}")
    arch = find_architecture(str(names[0]))
    if model_type is not None and model_type != arch.model_type:
        raise ValueError(
            f"config.json: model_type {model_type!r} contradicts architecture {arch.name}, whose "
            f"model_type is {arch.model_type!r}"
        )
    return arch


def _refuse_unsupported(raw: Mapping[str, Any], arch: Architecture) -> None:
    for key, value in raw.items():
        inert = _INERT_VALUES.get(key)
        if inert is None and _FOREIGN_KEY.search(key):
            inert = (0, False, [])
        if inert is not None and value is not None and value not in inert:
            allowed = " or ".join(repr(v) for v in inert) or "null"
            raise ValueError(
                f"config.json: {key}={value!r} is not implemented for {arch.name}; allowed: "
                f"{allowed}"
            )
    # A class that fixes its biases reads no such setting, so one that says otherwise is a mistake.
    fixed = {"attention_bias": arch.qkv_bias, "mlp_bias": None if arch.has_mlp_bias else False}
    for key, has_bias in fixed.items():
        if has_bias is not None and raw.get(key) is (not has_bias):
            raise ValueError(
                f"config.json: {key}={raw[key]!r} contradicts {arch.name}, where it is always "
                f"{has_bias}"
            )
    auto_map = raw.get("auto_map") or {}
    if not isinstance(auto_map, dict):
        raise ValueError(f"config.json: auto_map must be an object, got {auto_map!r}")
    code = auto_map.get("AutoModelForCausalLM")
    # Hubs put the repository before the class, behind two dashes.
    if code is not None and str(code).rpartition("--")[2] != arch.published_as:
        raise ValueError(
            f"config.json: auto_map={auto_map!r} asks for the checkpoint's own model code, "
            f"which is never run; only the built-in {arch.name} is"
        )


def _num_mtp_layers(raw: Mapping[str, Any]) -> int:
    found = {key: raw[key] for key in _MTP_KEYS if raw.get(key) is not None}
    for key, value in found.items():
        if type(value) is not int or value < 0:
            raise ValueError(f"config.json: {key} must be 0 or a positive integer, got {value!r}")
    if len(set(found.values())) > 1:
        raise ValueError(f"config.json: {' and '.join(found)} disagree: {found}")
    return max(found.values(), default=0)


def _head_dim(values: Values, hidden_size: int, num_heads: int) -> int:
    if values.get("head_dim") is not None:
        return values.count("head_dim")
    if hidden_size % num_heads:
        raise ValueError(
            f"config.json: hidden_size ({hidden_size}) is not a multiple of num_attention_heads "
            f"({num_heads}) and head_dim is not given"
        )
    return hidden_size // num_heads


def _sliding_window(
    values: Values, arch: Architecture, num_layers: int, max_positions: int
) -> int | None:
    window = None if values.get("sliding_window") is None else values.count("sliding_window")
    off = values.get("use_sliding_window") is not None and not values.flag("use_sliding_window")
    if off and arch.window != "uniform":
        window = None
    if arch.window == "none" and window is not None:
        raise ValueError(f"config.json: sliding_window={window!r} is not part of {arch.name}")
    layers = _layer_types(values, arch, window, num_layers)
    if len(set(layers)) > 1:
        raise ValueError(
            "config.json: layers that differ in attention (sliding and full) are not supported; "
            f"layer_types is {layers}"
        )
    if layers[0] == "full_attention":
        window = None
    elif window is None:
        raise ValueError(f"config.json: layer_types is {layers} but sliding_window is not active")
    # A window as long as the context hides nothing.
    return None if window is None or window >= max_positions else window


def _layer_types(
    values: Values, arch: Architecture, window: int | None, num_layers: int
) -> list[str]:
    """Attention of each layer, as config.json lists it or as the architecture derives it."""
    given = values.get("layer_types")
    if given is not None:
        known = ["full_attention", "sliding_attention"]
        fits = isinstance(given, list) and len(given) == num_layers
        if not fits or not all(layer in known for layer in given):
            raise ValueError(
                f"config.json: layer_types must list {num_layers} of {known}, got {given!r}"
            )
        if arch.window == "uniform" and window is not None and "full_attention" in given:
            raise ValueError(
                f"config.json: {arch.name} slides every layer (sliding_window={window}), but "
                f"layer_types is {given}"
            )
        return list(given)
    if window is None:
        return ["full_attention"] * num_layers
    first = 0
    if arch.window == "layered" and values.get("max_window_layers") != 0:
        first = values.count("max_window_layers")
    return ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]


def _eos_ids(*sources: Any) -> tuple[int, ...]:
    """End-of-text ids of every source (an id, a list or null), in order, each once."""
    ids: list[int] = []
    for source in sources:
        ids.extend(source if isinstance(source, list) else [] if source is None else [source])
    if not all(type(token_id) is int for token_id in ids):
        raise ValueError(f"eos_token_id must be an integer or a list of them, got {sources!r}")
    return tuple(dict.fromkeys(ids))


def _dtype(raw: Mapping[str, Any], fallback: torch.dtype) -> torch.dtype:
    name = raw.get("dtype", raw.get("torch_dtype"))
    if name is None:
        return fallback
    if not isinstance(name, str) or name not in _DTYPES:
        raise ValueError(
            f"config.json: dtype {name!r} is not supported; allowed: {', '.join(_DTYPES)}"
        )
    return _DTYPES[name]
