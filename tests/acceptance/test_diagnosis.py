"""The check at load, on trained heads: each kind of damage is refused, and named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from graphengine import self_check
from graphengine.config import CacheConfig, EngineConfig
from graphengine.engine import Engine
from graphengine.speculative_config import SpeculativeConfig
from tests.acceptance.test_tiny_family import WEIGHTS

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]


def start(method: str, head: Path, max_model_len: int = 256) -> None:
    """Start an engine that checks the head, as is the default, and fails where it is poor."""
    config = EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=2,
        speculative=SpeculativeConfig(
            method, model=head, max_draft_tokens=2, self_check="error", adaptive=False
        ),
        cache=CacheConfig(num_blocks=40),
    )
    Engine(WEIGHTS / "target", config).close()


def swap(name: str) -> Callable[[Config, Tensors], None]:
    """The halves of a matrix's columns change places."""

    def damage(config: Config, tensors: Tensors) -> None:
        for found in [one for one in tensors if one.endswith(name)]:
            halves = tensors[found].chunk(2, dim=1)
            tensors[found] = torch.cat(list(reversed(halves)), dim=1)

    return damage


def swap_qkv(config: Config, tensors: Tensors) -> None:
    for name in ("q_proj.weight", "k_proj.weight", "v_proj.weight"):
        swap(name)(config, tensors)


def other_norm(config: Config, tensors: Tensors) -> None:
    config["norm_before_residual"] = not config["norm_before_residual"]


def other_layers(config: Config, tensors: Tensors) -> None:
    taps = config["eagle_aux_hidden_state_layer_ids"]
    config["eagle_aux_hidden_state_layer_ids"] = [tap - 1 for tap in taps]


def head_of_another(config: Config, tensors: Tensors) -> None:
    head = load_file(WEIGHTS / "target" / "model.safetensors")["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = head.flip(0)


def noise(config: Config, tensors: Tensors) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            shape = tensor.shape
            tensors[name] = (torch.randn(shape, generator=generator) * 0.1).to(tensor.dtype)


@pytest.mark.parametrize("max_model_len", [20, 64, 256])
@pytest.mark.parametrize("name", ["eagle1", "eagle3", "mtp", "draft_model"])
def test_what_was_trained_passes(name: str, max_model_len: int) -> None:
    """Guards a sound draft that is refused for the little that a short text shows."""
    start("eagle" if name.startswith("eagle") else name, WEIGHTS / name, max_model_len)


def damaged(tmp_path: Path, name: str, damage: Callable[[Config, Tensors], None]) -> Path:
    """A copy of a trained checkpoint, less one thing."""
    head = tmp_path / name
    shutil.copytree(WEIGHTS / name, head)
    config = json.loads((head / "config.json").read_text("utf-8"))
    tensors = load_file(head / "model.safetensors")
    damage(config, tensors)
    (head / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({key: one.contiguous() for key, one in tensors.items()}, head / "model.safetensors")
    return head


@pytest.mark.parametrize(
    ("damage", "suspect"),
    [
        (swap_qkv, "the order of concatenation"),
        (other_norm, "the norm (norm_before_residual)"),
        (other_layers, "the aux layers (shifted by +1)"),
    ],
)
def test_the_reading_that_fits_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Config, Tensors], None],
    suspect: str,
) -> None:
    """Guards a diagnosis that leads astray.

    Of bytes, a head that has learned them draws so much from the last one that none of these takes
    it to chance (three drafts in four are right, with them one in two); so chance is set higher.
    """
    monkeypatch.setattr(self_check, "LUCK", 0.6)
    monkeypatch.setattr(self_check, "MOST_CHANCE", 0.6)
    start("eagle", WEIGHTS / "eagle3")
    with pytest.raises(ValueError, match="self_check: proposer") as raised:
        start("eagle", damaged(tmp_path, "eagle3", damage))
    assert f"suspect {suspect}: read the other way, " in str(raised.value)


@pytest.mark.parametrize(
    ("name", "damage", "suspect"),
    [
        ("eagle3", noise, "suspect a norm (norm_before_residual, norm_output, fc_norm), the order"),
        ("eagle1", swap("fc.weight"), "suspect the order of concatenation: read the other way"),
        ("eagle1", head_of_another, "suspect the head: read the other way"),
        ("mtp", swap("input_proj.weight"), "suspect the order of concatenation: read the other"),
    ],
)
def test_damage_is_refused_and_named(
    tmp_path: Path, name: str, damage: Callable[[Config, Tensors], None], suspect: str
) -> None:
    """Guards a head that runs, costs and accepts nothing, and a message that leads astray."""
    head = damaged(tmp_path, name, damage)
    with pytest.raises(ValueError, match="self_check: proposer") as raised:
        start("eagle" if name.startswith("eagle") else name, head)
    assert suspect in str(raised.value)
