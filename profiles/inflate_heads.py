"""EAGLE heads for cost-inflated targets: the same drafts at the cost of the larger shape.

A head that reads the padded stream of `inflate.py`'s target, padded in the same way. Its layer has
the target's new sizes, as a head trained for that shape would.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from profiles.inflate import Inflater, Sizes, Tensors, named

_IDS = ("d2t", "t2d")


def inflate_head(
    head: Path, folder: Path, sizes: Sizes, *, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """Write an EAGLE-1 or EAGLE-3 head for a target of these sizes, and return the folder.

    Raises:
        ValueError: norms over what comes in (`fc_norm`), or sizes into which it does not fit.
    """
    config = json.loads((head / "config.json").read_text(encoding="utf-8"))
    layer = config.get("transformer_layer_config", config)
    if config.get("fc_norm"):
        raise ValueError("fc_norm=true: its mean over the padded stream has no gain to rescale")
    old = _sizes(layer, sizes)
    inflater = Inflater(old, sizes, dtype)
    tensors = load_file(head / "model.safetensors")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_tensors(tensors, inflater), folder / "model.safetensors")
    layer |= named(sizes)
    if layer.get("rms_norm_eps") is not None:
        layer["rms_norm_eps"] = inflater.eps(layer["rms_norm_eps"])
    if config.get("target_hidden_size") is not None:
        config["target_hidden_size"] = sizes.hidden_size
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder


def _sizes(layer: dict[str, Any], new: Sizes) -> Sizes:
    return Sizes(
        hidden_size=layer["hidden_size"],
        intermediate_size=layer["intermediate_size"],
        num_layers=new.num_layers,
        num_heads=layer["num_attention_heads"],
        num_kv_heads=layer["num_key_value_heads"],
        head_dim=layer["head_dim"],
        vocab_size=layer["vocab_size"],
    )


def _tensors(tensors: Tensors, inflater: Inflater) -> Tensors:
    prefix = "layers.0."
    layer = {
        name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)
    }
    out = {prefix + name: one for name, one in inflater.layer(layer).items()}
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            continue
        if name == "t2d":
            out[name] = torch.zeros(inflater.new.vocab_size, dtype=tensor.dtype)
            out[name][: len(tensor)] = tensor
        elif name in _IDS:
            out[name] = tensor
        elif name == "fc.weight":  # reads streams beside each other, writes one
            rows = inflater.reader(tensor, inflater.new.hidden_size)
            rows[len(tensor) :] = 0
            out[name] = rows
        elif name == "embed_tokens.weight":
            out[name] = inflater.embedding(tensor)
        elif name == "lm_head.weight":
            own_ids = len(tensor) if "d2t" in tensors else inflater.new.vocab_size
            out[name] = inflater.head(tensor, own_ids)
        else:
            assert tensor.dim() == 1, f"{name} {tuple(tensor.shape)}: neither norm nor known"
            out[name] = inflater.norm(tensor)
    return out
