"""Tiny checkpoints with layers for multi-token prediction, in every family's names.

The layers are made once under plain names (`MtpLayers`), which the reference reads, and written
under a family's: into the target's own checkpoint, or into a directory of their own. The names
stand here once more, so that a slip in the package's table shows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny import make_checkpoint

SINGLE_FILE = "model.safetensors"
Weights = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """How a family writes a layer and what it computes."""

    prefix: str  # of the block; `{}` is the layer's index
    names: dict[str, str]  # plain name -> the family's whole name
    hidden_first: bool = False
    adds_one: bool = False
    zero_first: bool = False
    renamed: dict[str, str] = field(default_factory=dict)  # within the block


def _names(prefix: str, embed: str, hidden: str, projection: str, final: str) -> dict[str, str]:
    parts = {"embed_norm": embed, "hidden_norm": hidden, "projection": projection, "final": final}
    return {plain: f"{prefix}{name}.weight" for plain, name in parts.items()}


_MIMO = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
FORMS = {
    "mimo": Form(
        prefix="model.mtp_layers.{}.",
        names=_names("model.mtp_layers.{}.", *_MIMO),
        hidden_first=True,
        zero_first=True,
    ),
    "deepseek": Form(
        prefix="model.layers.{}.",
        names={
            **_names("model.layers.{}.", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
            "embedding": "model.layers.{}.embed_tokens.weight",
            "head": "model.layers.{}.shared_head.head.weight",
        },
    ),
    "mimo_v2": Form(
        prefix="model.mtp.layers.{}.",
        names=_names("model.mtp.layers.{}.", "enorm", "hnorm", "eh_proj", "final_layernorm"),
        renamed={"post_attention_layernorm.weight": "pre_mlp_layernorm.weight"},
    ),
    "qwen3_next": Form(
        prefix="mtp.layers.{}.",
        names=_names("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
        adds_one=True,
    ),
    "speculators": Form(
        prefix="mtp_layers.{}.",
        names={
            **_names("mtp_layers.{}.", *_MIMO),
            "embedding": "embed_tokens.weight",
            "head": "lm_head.weight",
        },
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpCheckpoint:
    """A target on disk and its layers.

    Attributes:
        target: directory of the target.
        model: directory of the layers, None where they are in the target's.
        layers: parameters by plain name, a layer each; norms multiply by them as they are.
    """

    target: Path
    model: Path | None
    form: Form
    layers: list[Weights]

    @property
    def options(self) -> dict[str, Any]:
        """Of `Setup.start`; random layers draft near chance."""
        model = None if self.model is None else str(self.model)
        return {"method": "mtp", "model": model, "self_check": "off"}


def make_mtp(
    directory: Path,
    family: str = "deepseek",
    *,
    arch: str = "llama",
    num_layers: int = 1,
    apart: bool = False,
    copies: bool = False,
    **overrides: Any,
) -> MtpCheckpoint:
    """Write a random target with random layers.

    Args:
        apart: the layers lie in a directory beside the target's.
        copies: they bring an embedding and an output head that are not the target's.
        overrides: of the target's config.
    """
    target = make_checkpoint(directory / "target", arch, **overrides)
    layers = make_layers(load_file(target / SINGLE_FILE), num_layers, copies=copies)
    return add_layers(target, family, layers, directory / "layers" if apart else None)


def add_layers(
    target: Path, family: str, layers: list[Weights], model: Path | None = None
) -> MtpCheckpoint:
    """Write layers into a target's checkpoint, or into the directory `model`."""
    form, weights = FORMS[family], load_file(target / SINGLE_FILE)
    if "{}" not in form.names["projection"]:
        shared = {name: tensor for name, tensor in layers[0].items() if name in form.names}
        layers = [layer | shared for layer in layers]
    config = json.loads((target / "config.json").read_text())
    count_key = "mtp_num_hidden_layers" if family == "qwen3_next" else "num_nextn_predict_layers"
    own: dict[str, Any] = {count_key: len(layers)}
    tensors = stored(form, layers, config["num_hidden_layers"] if family == "deepseek" else 0)
    if model is None:
        write(target, config | own, weights | tensors)
    else:
        if family == "speculators":
            own |= {"speculators_model_type": "mtp", "transformer_layer_config": config}
        write(model, own, tensors)
    return MtpCheckpoint(target=target, model=model, form=form, layers=layers)


def make_layers(target: Weights, num_layers: int, *, copies: bool = False) -> list[Weights]:
    """Random layers like the target's second one."""
    generator = torch.Generator().manual_seed(7)
    hidden = target["model.norm.weight"].numel()
    prefix, vocabulary = "model.layers.1.", target["model.embed_tokens.weight"].shape
    shapes = {
        **dict.fromkeys(("embed_norm", "hidden_norm", "final"), (hidden,)),
        "projection": (hidden, 2 * hidden),
        **{n.removeprefix(prefix): t.shape for n, t in target.items() if n.startswith(prefix)},
        **({"embedding": vocabulary} if copies else {}),
    }
    layers = [
        {name: _random(name, torch.Size(shape), generator) for name, shape in shapes.items()}
        for _ in range(num_layers)
    ]
    if copies:
        head = _random("head", vocabulary, generator)
        layers = [{**layer, "embedding": layers[0]["embedding"], "head": head} for layer in layers]
    return layers


def _random(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if len(shape) == 1 and not name.endswith("bias"):
        return 1.0 + 0.2 * noise
    return (0.05 if name in ("embedding", "head") else 0.25) * noise


def stored(form: Form, layers: list[Weights], first: int = 0) -> Weights:
    """The layers under a family's names, counted from `first` on."""
    tensors: Weights = {}
    for index, layer in enumerate(layers, start=first):
        for plain, tensor in layer.items():
            name = form.names.get(plain, form.prefix + form.renamed.get(plain, plain))
            is_norm = tensor.dim() == 1 and not plain.endswith("bias")
            value = tensor - 1 if form.adds_one and is_norm else tensor
            tensors[name.format(index)] = value.clone()
    return tensors


def write(directory: Path, config: dict[str, Any], weights: Weights) -> None:
    """Both files of a checkpoint."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, directory / SINGLE_FILE, metadata={"format": "pt"})
