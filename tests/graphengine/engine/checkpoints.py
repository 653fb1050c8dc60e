"""Tiny checkpoints of the engine tests, made once a session and edited where a test needs a trait.

Knows only files: a trait is written into config.json or the safetensors of a fresh directory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.draft_heads import Head, make_eagle3, make_echo
from tests.tiny import make_checkpoint

Weights = dict[str, torch.Tensor]


class Checkpoints:
    """Checkpoints by name, below one directory, each made on its first use."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def get(self, name: str = "llama") -> Path:
        """The named checkpoint.

        Names: `llama` (text that varies), `loopy` (text that falls into cycles, so that n-grams
        hit), `qwen3` (q/k norm, bias, one KV head), `window` (sliding window), `ties` (ids in
        pairs with equal logits), `near` (attention over 4 tokens, plain embeddings). EAGLE heads:
        `eagle3` (random, 100 draft ids), `echo` (perfect for `near`), `rough` and `rough-loopy`
        (right at times, for `near` and `loopy`).
        """
        directory = self._root / name
        if not directory.exists():
            _MAKERS[name](directory)
        return directory

    def with_eos(self, token_ids: list[int], name: str = "llama") -> Path:
        """The named checkpoint with other end-of-sequence ids in its config."""
        directory = self._root / f"{name}-eos-{'-'.join(map(str, token_ids))}"
        if directory.exists():
            return directory
        source = self.get(name)
        directory.mkdir()
        for path in source.iterdir():
            if path.name not in ("config.json", "generation_config.json"):
                (directory / path.name).symlink_to(path)
        for file_name in ("config.json", "generation_config.json"):
            values: dict[str, Any] = json.loads((source / file_name).read_text())
            values["eos_token_id"] = token_ids
            (directory / file_name).write_text(json.dumps(values))
        return directory


def edit_weights(directory: Path, change: Callable[[Weights], None]) -> None:
    """Rewrite the one safetensors file of a checkpoint."""
    path = directory / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


def _make_loopy(directory: Path) -> None:
    """Attention has next to no say, so that the next token is nearly a function of the last."""
    make_checkpoint(directory)

    def silence_attention(weights: Weights) -> None:
        for name, tensor in weights.items():
            if name.endswith("o_proj.weight"):
                tensor.mul_(0.0002)

    edit_weights(directory, silence_attention)


def _make_ties(directory: Path) -> None:
    """Every head row occurs twice: id i and id i + half have the same logit at every position."""
    make_checkpoint(directory)

    def double_head(weights: Weights) -> None:
        head = weights["lm_head.weight"]
        half = head.shape[0] // 2
        head[half : 2 * half] = head[:half]

    edit_weights(directory, double_head)


def _make_near(directory: Path) -> None:
    """Embeddings that the first norm leaves alone, and a short window: see `make_echo`."""
    make_checkpoint(directory, "mistral", sliding_window=4)

    def plain_embeddings(weights: Weights) -> None:
        weights["model.layers.0.input_layernorm.weight"].fill_(1)
        embedding = weights["model.embed_tokens.weight"]
        embedding *= ((1 - 1e-5) / embedding.square().mean(-1, keepdim=True)).sqrt()

    edit_weights(directory, plain_embeddings)


_MAKERS: dict[str, Callable[[Path], Any]] = {
    "llama": make_checkpoint,
    "loopy": _make_loopy,
    "ties": _make_ties,
    "qwen3": lambda directory: make_checkpoint(
        directory, "qwen3", num_key_value_heads=1, attention_bias=True
    ),
    "window": lambda directory: make_checkpoint(directory, "mistral", sliding_window=24),
    "near": _make_near,
    "eagle3": lambda directory: make_eagle3(directory, Head(draft_vocab=100, fc_norm=True)),
    "echo": lambda directory: make_echo(directory, Checkpoints(directory.parent).get("near")),
    "rough": lambda directory: make_echo(
        directory, Checkpoints(directory.parent).get("near"), noise=0.05
    ),
    "rough-loopy": lambda directory: make_echo(
        directory, Checkpoints(directory.parent).get("loopy"), noise=0.02
    ),
}
