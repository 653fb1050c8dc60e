"""From a GGUF file's metadata to a `ModelConfig`.

Every key under the architecture's name is either read here or refused by name and value, because
the format is a closed one: an unknown key may change the arithmetic. Knows nothing of tensor
contents, except for the frequency factors of the rotation, which GGUF stores as a tensor.
"""

from collections.abc import Mapping
from typing import Any

import torch

from graphengine.models.config import ModelConfig, RopeConfig
from graphengine.models.gguf_file import GGUFFile
from graphengine.models.registry import Architecture, find_gguf_architecture
from graphengine.models.values import Values

ROPE_FACTORS_TENSOR = "rope_freqs.weight"

_READ = (
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
)
# Keys that change the arithmetic or the layout, and the values under which they do nothing.
_INERT_VALUES: Mapping[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.sliding_window": (0,),
    "attention.causal": (True,),
    "rope.scaling.finetuned": (True, False),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scale_linear": (1.0,),
    "use_parallel_residual": (False,),
    "tensor_data_layout": ("Meta AI original pth",),
}


def read_gguf_config(file: GGUFFile) -> ModelConfig:
    """Build the model's config.

    The dtype is bfloat16 whatever the encoding of the tensors; biases and the tied head follow from
    which tensors are present.

    Raises:
        ValueError: An unknown architecture, a missing or malformed value, or a setting that the
            decoder does not implement; the message names file, key and value.
    """
    name = file.metadata.get("general.architecture")
    if name is None:
        raise ValueError(f"{file.path} has no general.architecture in its metadata")
    arch = find_gguf_architecture(str(name))
    _refuse_unsupported(file, f"{name}.")
    values = Values(str(file.path), file.metadata, prefix=f"{name}.")
    hidden_size = values.count("embedding_length")
    num_heads = values.count("attention.head_count")
    head_dim = _head_dim(values, hidden_size, num_heads)
    max_positions = values.count("context_length")
    biases = _biases(file, arch)
    return ModelConfig(
        architecture=arch.name,
        vocab_size=_vocab_size(file, values),
        hidden_size=hidden_size,
        intermediate_size=values.count("feed_forward_length"),
        num_layers=values.count("block_count"),
        num_heads=num_heads,
        num_kv_heads=values.count("attention.head_count_kv", null_means=num_heads),
        head_dim=head_dim,
        rms_norm_eps=values.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(file, values, max_positions),
        max_position_embeddings=max_positions,
        tie_word_embeddings="output.weight" not in file.tensors,
        **biases,
        qk_norm=arch.qk_norm,
        sliding_window=None,
        eos_token_ids=_eos_ids(file.metadata),
        dtype=torch.bfloat16,
    )


def _refuse_unsupported(file: GGUFFile, prefix: str) -> None:
    for full_key, value in file.metadata.items():
        key = full_key.removeprefix(prefix)
        if not full_key.startswith(prefix) or key in _READ:
            continue
        if value not in _INERT_VALUES.get(key, ()):
            allowed = " or ".join(repr(v) for v in _INERT_VALUES.get(key, ())) or "absent"
            raise ValueError(
                f"{file.path}: {full_key}={value!r} is not implemented; allowed: {allowed}"
            )


def _head_dim(values: Values, hidden_size: int, num_heads: int) -> int:
    if values.get("attention.key_length") is None and hidden_size % num_heads:
        raise ValueError(
            f"embedding_length ({hidden_size}) is not a multiple of attention.head_count "
            f"({num_heads}) and attention.key_length is absent"
        )
    head_dim = values.count("attention.key_length", null_means=hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if values.count(key, null_means=head_dim) != head_dim:
            raise ValueError(f"{key}={values.get(key)} differs from the head size {head_dim}")
    return head_dim


def _vocab_size(file: GGUFFile, values: Values) -> int:
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path} has no tensor token_embd.weight; is it a language model?")
    rows = file.tensors["token_embd.weight"].shape[0]
    if values.count("vocab_size", null_means=rows) != rows:
        raise ValueError(
            f"{file.path}: vocab_size is {values.get('vocab_size')} but token_embd.weight has "
            f"{rows} rows"
        )
    return rows


def _biases(file: GGUFFile, arch: Architecture) -> dict[str, bool]:
    """Which projections have biases, as the tensors tell; the architecture must agree."""
    present = {
        "qkv_bias": "blk.0.attn_q.bias" in file.tensors,
        "o_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
    }
    fixed = {
        "qkv_bias": arch.qkv_bias,
        "o_bias": arch.o_bias,
        "mlp_bias": None if arch.has_mlp_bias else False,
    }
    for name, is_present in present.items():
        if fixed[name] is not None and fixed[name] != is_present:
            raise ValueError(
                f"{file.path}: {name} is {is_present} by its tensors, but {arch.name} has "
                f"{fixed[name]}"
            )
    return present


def _rope(file: GGUFFile, values: Values, max_positions: int) -> RopeConfig:
    theta = values.number("rope.freq_base", null_means=10000.0)
    # A factor without a type is how files from before the type key say linear.
    has_factor = values.get("rope.scaling.factor") is not None
    kind = values.get("rope.scaling.type") or ("linear" if has_factor else "none")
    if kind in ("linear", "yarn"):
        if ROPE_FACTORS_TENSOR in file.tensors:
            raise ValueError(
                f"{file.path}: rope.scaling.type={kind!r} and {ROPE_FACTORS_TENSOR} together"
            )
        original = values.count("rope.scaling.original_context_length", null_means=max_positions)
        return RopeConfig(
            kind=kind,
            theta=theta,
            factor=values.number("rope.scaling.factor"),
            original_max_position_embeddings=original if kind == "yarn" else 0,
        )
    if kind != "none":
        raise ValueError(
            f"{file.path}: rope.scaling.type={kind!r} is not supported; allowed: none, linear, yarn"
        )
    if ROPE_FACTORS_TENSOR not in file.tensors:
        return RopeConfig(theta=theta)
    factors = tuple(file.read(ROPE_FACTORS_TENSOR).float().tolist())
    return RopeConfig(theta=theta, frequency_factors=factors)


def _eos_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """The end-of-text and end-of-turn ids: both end generation in a chat-tuned model."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return tuple(dict.fromkeys(metadata[key] for key in keys if key in metadata))
