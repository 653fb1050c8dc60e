"""Random EAGLE heads for a tiny target, in every public form, written on the spot.

`make_eagle1` and `make_eagle3` write a directory; what a head is made of is a flat record, so that
tests can turn each flag by itself. Weights are fp32, and of such a size that no part of the head is
drowned by another.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from tests.tiny import VOCAB_SIZE

Tensor = torch.Tensor
Form = Literal["eagle", "nvidia", "vllm", "speculators"]

LAYER: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """What an EAGLE-3 head is made of. `aux` are taps: states after so many layers."""

    aux: tuple[int, ...] = (0, 1, 2)
    draft_vocab: int = VOCAB_SIZE
    target_hidden: int = 64
    norm_before_residual: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    fc_bias: bool = False
    has_fc: bool = True
    own_embedding: bool = False
    own_head: bool = True
    form: Form = "vllm"
    layer: tuple[tuple[str, Any], ...] = ()  # changes to LAYER
    seed: int = 0

    @property
    def config(self) -> dict[str, Any]:
        """The config.json."""
        layer = LAYER | dict(self.layer)
        flags: dict[str, Any] = {
            "norm_before_residual": self.norm_before_residual,
            "norm_output": self.norm_output,
            "norm_before_fc": self.norm_before_fc,
            "fc_norm": self.fc_norm,
            "eagle_aux_hidden_state_layer_ids": list(self.aux),
        }
        top: dict[str, Any] = {"draft_vocab_size": self.draft_vocab, "bias": self.fc_bias}
        if self.target_hidden != layer["hidden_size"]:
            top["target_hidden_size"] = self.target_hidden
        if self.form == "speculators":
            return {
                **top,
                **flags,
                "architectures": ["Eagle3Speculator"],
                "speculators_model_type": "eagle3",
                "speculators_version": "0.9.0",
                "speculators_config": {"algorithm": "eagle3"},
                "transformer_layer_config": layer,
            }
        if self.form == "nvidia":
            nested = {**flags, "use_aux_hidden_state": self.has_fc, "use_last_layernorm": True}
            name = "LlamaForCausalLMEagle3"
            return {**layer, **top, "architectures": [name], "eagle_config": nested}
        if self.form == "eagle":  # which has no flags, and no ids
            assert not any(flags[name] for name in flags if "norm" in name), "a form without flags"
            return {**layer, **top, "architectures": ["LlamaForCausalLM"]}
        return {**layer, **top, **flags, "architectures": ["Eagle3LlamaForCausalLM"]}


def make_eagle3(directory: Path, head: Head, **extra: Tensor) -> dict[str, Tensor]:
    """Write a head and return its tensors, named as in the `speculators` layout.

    Args:
        extra: more tensors, or others of these names; `d2t` and `t2d` come from `draft_table`
            where the draft's vocabulary is smaller.
    """
    layer, draw = LAYER | dict(head.layer), _Draw(head.seed)
    hidden, columns = layer["hidden_size"], len(head.aux) * head.target_hidden
    tensors = _layers(draw, layer, input_size=2 * hidden)
    tensors["layers.0.hidden_norm.weight"] = draw.norm(hidden)
    tensors["norm.weight"] = draw.norm(hidden)
    if head.has_fc:
        tensors["fc.weight"] = draw.matrix(hidden, columns)
    if head.fc_bias:
        tensors["fc.bias"] = draw.vector(hidden)
    if head.norm_before_fc:
        tensors["input_norm.weight"] = draw.norm(columns)
    if head.fc_norm:
        for index in range(len(head.aux)):
            tensors[f"fc_norm.{index}.weight"] = draw.norm(head.target_hidden)
    if head.own_embedding:
        tensors["embed_tokens.weight"] = draw.vector(layer["vocab_size"], hidden)
    if head.own_head:
        tensors["lm_head.weight"] = draw.vector(head.draft_vocab, hidden)
    if head.draft_vocab < VOCAB_SIZE:
        tensors |= draft_table(head.draft_vocab, head.seed)
    tensors |= extra
    write(directory, head.config, tensors, "midlayer." if head.form == "eagle" else "layers.0.")
    return tensors


def make_eagle1(
    directory: Path,
    *,
    bias: bool = True,
    own_embedding: bool = True,
    seed: int = 0,
    **layer: Any,
) -> dict[str, Tensor]:
    """Write an EAGLE-1 head and return its tensors."""
    config, draw = LAYER | layer, _Draw(seed)
    hidden = config["hidden_size"]
    tensors = _layers(draw, config, input_size=hidden)
    del tensors["layers.0.input_layernorm.weight"]
    tensors["fc.weight"] = draw.matrix(hidden, 2 * hidden)
    if bias:
        tensors["fc.bias"] = draw.vector(hidden)
    if own_embedding:
        tensors["embed_tokens.weight"] = draw.vector(config["vocab_size"], hidden)
    given = {} if bias else {"bias": False}
    write(directory, {**config, **given, "architectures": ["LlamaForCausalLM"]}, tensors)
    return tensors


def make_echo(directory: Path, target: Path, *, noise: float = 0.0) -> dict[str, Tensor]:
    """Write an EAGLE-1 head that is the target over again, fed with the tokens alone.

    Its drafts are the target's own tokens wherever attention does not reach back to token 0, which
    no row of a head embeds. The target's embeddings must pass its first norm as they are.

    Args:
        noise: on the projection, features included; from 0.1 on a part of the drafts is wrong.
    """
    config = json.loads((target / "config.json").read_text())
    stored = load_file(target / "model.safetensors")
    hidden = config["hidden_size"]
    tensors = {
        name.removeprefix("model."): one
        for name, one in stored.items()
        if name.startswith("model.layers.") and name != "model.layers.0.input_layernorm.weight"
    }
    draw = _Draw(0)
    tensors["fc.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1)
    tensors["fc.weight"] += noise * draw.matrix(hidden, 2 * hidden)
    # EAGLE-1 has no final norm: its gains are in the head, and its scale moves no argmax.
    tensors["lm_head.weight"] = stored["lm_head.weight"] * stored["model.norm.weight"]
    write(directory, {**config, "bias": False}, tensors)
    return tensors


def write(
    directory: Path, config: dict[str, Any], tensors: dict[str, Tensor], first: str = "layers.0."
) -> None:
    """A directory of config.json and one safetensors file.

    Args:
        first: what the first layer is called.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    stored = {name.replace("layers.0.", first): one for name, one in tensors.items()}
    save_file(
        {name: one.contiguous() for name, one in stored.items()}, directory / "model.safetensors"
    )


def draft_table(draft_vocab: int, seed: int = 0) -> dict[str, Tensor]:
    """`d2t` as offsets and `t2d`, of ids in no order."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(VOCAB_SIZE, generator=generator)[:draft_vocab]
    marks = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    marks[ids] = True
    return {"d2t": ids - torch.arange(draft_vocab), "t2d": marks}


class _Draw:
    """Random parameters."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def vector(self, *shape: int) -> Tensor:
        return 0.3 * torch.randn(shape, generator=self._generator)

    def norm(self, size: int) -> Tensor:
        return 1 + self.vector(size)

    def matrix(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=self._generator) / columns**0.5


def _layers(draw: _Draw, layer: dict[str, Any], *, input_size: int) -> dict[str, Tensor]:
    """Every layer's parameters; q, k and v of the first read `input_size` columns."""
    hidden, inner = layer["hidden_size"], layer["intermediate_size"]
    q_size = layer["num_attention_heads"] * layer["head_dim"]
    kv_size = layer["num_key_value_heads"] * layer["head_dim"]
    tensors: dict[str, Tensor] = {}
    for index in range(layer["num_hidden_layers"]):
        columns = input_size if index == 0 else hidden
        parts = {
            "input_layernorm.weight": draw.norm(hidden),
            "self_attn.q_proj.weight": 2 * draw.matrix(q_size, columns),
            "self_attn.k_proj.weight": 2 * draw.matrix(kv_size, columns),
            "self_attn.v_proj.weight": draw.matrix(kv_size, columns),
            "self_attn.o_proj.weight": draw.matrix(hidden, q_size),
            "post_attention_layernorm.weight": draw.norm(hidden),
            "mlp.gate_proj.weight": draw.matrix(inner, hidden),
            "mlp.up_proj.weight": draw.matrix(inner, hidden),
            "mlp.down_proj.weight": draw.matrix(hidden, inner),
        }
        if layer.get("attention_bias") or layer.get("qkv_bias"):
            sizes = {"q": q_size, "k": kv_size, "v": kv_size}
            sizes |= {"o": hidden} if layer.get("attention_bias") else {}
            parts |= {f"self_attn.{one}_proj.bias": draw.vector(n) for one, n in sizes.items()}
        if layer["model_type"] == "qwen3":
            parts["self_attn.q_norm.weight"] = draw.norm(layer["head_dim"])
            parts["self_attn.k_norm.weight"] = draw.norm(layer["head_dim"])
        tensors |= {f"layers.{index}.{name}": one for name, one in parts.items()}
    return tensors
