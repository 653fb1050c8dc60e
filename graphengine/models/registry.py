"""Which architectures exist, and in what they differ.

One row for each Hugging Face class name. The decoder is the same for all of them; a row says which
parts of it the architecture uses and what its config means by an absent key. Parsing lives in
`hf_config.py` and `gguf_config.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """What sets one architecture apart.

    Attributes:
        name: Class name in the `architectures` list of config.json.
        model_type: The config's `model_type`, which must agree with `name`.
        qkv_bias, o_bias: True or False: fixed by the class. None: the config's `attention_bias`
            says.
        has_mlp_bias: Whether the config's `mlp_bias` is read; otherwise it must be absent or false.
        published_as: Module and class of the code that checkpoints bring (`auto_map`), where the
            row stands for just that class; any other code is refused.
        window: How `sliding_window` applies: "none" (the class has no such thing), "uniform" (to
            every layer) or "layered" (from `use_sliding_window`, `max_window_layers` and
            `layer_types`).
        defaults: What an absent key means, where that differs from `COMMON_DEFAULTS`.
    """

    name: str
    model_type: str
    qkv_bias: bool | None
    o_bias: bool | None
    has_mlp_bias: bool
    qk_norm: bool
    window: Literal["none", "uniform", "layered"]
    defaults: Mapping[str, object] = field(default_factory=dict)
    published_as: str | None = None


COMMON_DEFAULTS: Mapping[str, object] = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}

_QWEN_DEFAULTS: Mapping[str, object] = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
}

_ROWS = (
    Architecture(
        name="LlamaForCausalLM",
        model_type="llama",
        qkv_bias=None,
        o_bias=None,
        has_mlp_bias=True,
        qk_norm=False,
        window="none",
        defaults={"max_position_embeddings": 2048, "eos_token_id": 2},
    ),
    Architecture(
        name="MistralForCausalLM",
        model_type="mistral",
        qkv_bias=False,
        o_bias=False,
        has_mlp_bias=False,
        qk_norm=False,
        window="uniform",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "eos_token_id": 2,
        },
    ),
    Architecture(
        name="Qwen2ForCausalLM",
        model_type="qwen2",
        qkv_bias=True,
        o_bias=False,
        has_mlp_bias=False,
        qk_norm=False,
        window="layered",
        defaults=_QWEN_DEFAULTS,
    ),
    Architecture(
        name="Qwen3ForCausalLM",
        model_type="qwen3",
        qkv_bias=None,
        o_bias=None,
        has_mlp_bias=False,
        qk_norm=True,
        window="layered",
        defaults={**_QWEN_DEFAULTS, "head_dim": 128},
    ),
    # Qwen2 with layers for multi-token prediction. Its class has q, k and v biases whatever the
    # config says; heads that are published under its name may have none, and say so.
    Architecture(
        name="MiMoForCausalLM",
        model_type="mimo",
        qkv_bias=None,
        o_bias=False,
        has_mlp_bias=False,
        qk_norm=False,
        window="layered",
        defaults={**_QWEN_DEFAULTS, "attention_bias": True},
        published_as="modeling_mimo.MiMoForCausalLM",
    ),
)

ARCHITECTURES: Mapping[str, Architecture] = {row.name: row for row in _ROWS}

# Mistral files carry the name "llama" in GGUF: the tensors and the math are the same.
GGUF_ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": ARCHITECTURES["LlamaForCausalLM"],
    "qwen2": ARCHITECTURES["Qwen2ForCausalLM"],
    "qwen3": ARCHITECTURES["Qwen3ForCausalLM"],
}


def find_architecture(name: str) -> Architecture:
    """The row for a Hugging Face class name; ValueError listing the names otherwise."""
    if name not in ARCHITECTURES:
        raise ValueError(
            f"architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def find_gguf_architecture(name: str) -> Architecture:
    """The row for a GGUF `general.architecture`; ValueError listing the names otherwise."""
    if name not in GGUF_ARCHITECTURES:
        raise ValueError(
            f"GGUF architecture {name!r} is not supported; supported: "
            f"{', '.join(GGUF_ARCHITECTURES)}"
        )
    return GGUF_ARCHITECTURES[name]
