"""Draft checkpoints for a tiny target, such as `tiny_model.py`'s: a neighbour of it, random heads.

Written on the spot from fixed seeds. The draft model is the target with noise in its weights, so
that it is often right and never alike; the heads know nothing, which costs a test of distributions
nothing either.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensor = torch.Tensor
_NOISE = 0.15  # of the draft model's weights
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
)
_LAYER = {"model_type": "llama", "num_hidden_layers": 1, "rope_theta": 10000.0}


def write_draft(kind: str, folder: Path, target: Path) -> Path:
    """Write a draft's checkpoint into a folder that exists, and return it.

    Args:
        kind: `draft_model`, `eagle` (EAGLE-3) or `mtp` (MiMo names).
        target: the checkpoint that it drafts for.
    """
    makers: Mapping[str, Callable[[Path, Path], None]] = {
        "draft_model": _write_neighbour,
        "eagle": _write_eagle3,
        "mtp": _write_mtp,
    }
    makers[kind](folder, target)
    return folder


def _write_neighbour(folder: Path, target: Path) -> None:
    draw = torch.Generator().manual_seed(1)
    tensors = load_file(target / "model.safetensors")
    for name in sorted(tensors):
        noise = torch.randn(tensors[name].shape, generator=draw)
        tensors[name] = tensors[name] + _NOISE * tensors[name].std().nan_to_num() * noise
    _write(folder, tensors, _target_config(target))


def _write_eagle3(folder: Path, target: Path) -> None:
    """A head that can draft two thirds of the vocabulary."""
    config = _target_config(target)
    hidden, vocab_size, last = (
        config[name] for name in ("hidden_size", "vocab_size", "num_hidden_layers")
    )
    tensors = _layer("layers.0.", config, input_size=2 * hidden)
    ids = [token for token in range(vocab_size) if token % 3 != 1]
    offsets = [token - column for column, token in enumerate(ids)]
    tensors |= {
        "fc.weight": _matrix(2, hidden, 2 * hidden),
        "layers.0.hidden_norm.weight": torch.ones(hidden),
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": _matrix(3, len(ids), hidden),
        "d2t": torch.tensor(offsets),
        "t2d": torch.tensor([token in ids for token in range(vocab_size)]),
    }
    wanted = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": len(ids),
        "norm_before_residual": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [0, last],
        "transformer_layer_config": {name: config[name] for name in _SIZES} | _LAYER,
        "torch_dtype": "float32",
    }
    _write(folder, tensors, wanted)


def _write_mtp(folder: Path, target: Path) -> None:
    config = _target_config(target)
    hidden, prefix = config["hidden_size"], "model.mtp_layers.0."
    tensors = _layer(prefix, config, input_size=hidden)
    tensors[f"{prefix}input_proj.weight"] = _matrix(4, hidden, 2 * hidden)
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"{prefix}{name}.weight"] = torch.ones(hidden)
    _write(folder, tensors, {**config, "num_nextn_predict_layers": 1})


def _layer(prefix: str, config: Mapping[str, Any], *, input_size: int) -> dict[str, Tensor]:
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {
        "self_attn.q_proj": (heads, input_size),
        "self_attn.k_proj": (kv_heads, input_size),
        "self_attn.v_proj": (kv_heads, input_size),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors = {
        f"{prefix}{name}.weight": _matrix(index, *shape)
        for index, (name, shape) in enumerate(shapes.items(), start=10)
    }
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{prefix}{name}.weight"] = torch.ones(hidden)
    return tensors


def _matrix(seed: int, rows: int, columns: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return 0.25 * torch.randn(rows, columns, generator=draw)


def _target_config(target: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((target / "config.json").read_text(encoding="utf-8"))
    return found


def _write(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
