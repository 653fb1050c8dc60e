"""A tiny random Llama over a small vocabulary, written on the spot: a target for statistics.

Sixteen tokens, so that whole distributions can be counted. Its weights come from one seed, and are
of a size that makes its logits neither flat nor peaked. It has no tokenizer and no end token.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB_SIZE = 16
_HIDDEN, _INNER, _LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM = 32, 48, 2, 4, 2, 8
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": _HIDDEN,
    "intermediate_size": _INNER,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KV_HEADS,
    "head_dim": _HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def write_checkpoint(folder: Path, seed: int = 0) -> Path:
    """Write the model into a folder that exists, and return it."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {
        "self_attn.q_proj": (_HEADS * _HEAD_DIM, _HIDDEN),
        "self_attn.k_proj": (_KV_HEADS * _HEAD_DIM, _HIDDEN),
        "self_attn.v_proj": (_KV_HEADS * _HEAD_DIM, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, _HEADS * _HEAD_DIM),
        "mlp.gate_proj": (_INNER, _HIDDEN),
        "mlp.up_proj": (_INNER, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, _INNER),
    }
    tensors = {
        "model.embed_tokens.weight": 0.3 * torch.randn(VOCAB_SIZE, _HIDDEN, generator=draw),
        "model.norm.weight": torch.ones(_HIDDEN),
        "lm_head.weight": 0.22 * torch.randn(VOCAB_SIZE, _HIDDEN, generator=draw),
    }
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        for name, shape in shapes.items():
            tensors[f"{prefix}{name}.weight"] = 0.25 * torch.randn(*shape, generator=draw)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = torch.ones(_HIDDEN)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
    return folder
