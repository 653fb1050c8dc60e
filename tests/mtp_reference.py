"""Layers for multi-token prediction as plain torch: whole sequences, float64, no cache.

Written from the papers (DeepSeek-V3, 2412.19437, eq. 21 to 23, normed output handed on): the
definition that the engine's drafts are held to. Knows nothing of slots, windows or families' names.
"""

from __future__ import annotations

import json
import math

import torch
from torch import Tensor
from torch.nn import functional

from tests.mtp_checkpoints import MtpCheckpoint

Weights = dict[str, Tensor]


class Reference:
    """The layers of a checkpoint over a target's states.

    Args:
        checkpoint: the layers; the target's config has the sizes.
        embedding, head: [vocab, hidden] of the target.
    """

    def __init__(self, checkpoint: MtpCheckpoint, embedding: Tensor, head: Tensor) -> None:
        self.config = json.loads((checkpoint.target / "config.json").read_text())
        self.form = checkpoint.form
        self.layers = [
            {name: tensor.double() for name, tensor in layer.items()} for layer in checkpoint.layers
        ]
        self._embedding, self._head = embedding.double(), head.double()

    def logits(self, tokens: list[int], states: Tensor, drafts: list[int]) -> list[Tensor]:
        """Logits [vocab] that each of `drafts` is chosen from.

        Args:
            tokens: the history.
            states: [len(tokens) - 1, hidden] of the target behind its final norm.
            drafts: the drafts themselves, as later ones are made of earlier ones.
        """
        known, found = [*tokens, *drafts], []
        num_slots, below = len(tokens) - 1, states.double()
        above = below
        for step in range(len(drafts)):
            depth = min(step, len(self.layers) - 1)
            if step > depth:  # the last layer goes on by a slot, from its own state
                below = torch.cat([below, above[-1:]])
            slots = len(below)
            above = self.run(depth, known[1 + depth : 1 + depth + slots], below)
            found.append(self.read(above[-1]))
            if step < len(self.layers) - 1:
                below = above
        assert slots == num_slots + max(0, len(drafts) - len(self.layers))
        return found

    def run(self, depth: int, tokens: list[int], below: Tensor) -> Tensor:
        """The normed outputs [T, hidden] of a layer over slots 0..T - 1."""
        layer = self.layers[depth]
        embeds = layer.get("embedding", self._embedding)[tokens]
        if self.form.zero_first:
            embeds = torch.cat([torch.zeros_like(embeds[:1]), embeds[1:]])
        parts = [self._norm(embeds, layer["embed_norm"]), self._norm(below, layer["hidden_norm"])]
        mixed = torch.cat(parts[::-1] if self.form.hidden_first else parts, dim=-1)
        hidden = mixed @ layer["projection"].T
        hidden = hidden + self._attend(self._norm(hidden, layer["input_layernorm.weight"]), layer)
        normed = self._norm(hidden, layer["post_attention_layernorm.weight"])
        gate, up = (normed @ layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        hidden = hidden + (functional.silu(gate) * up) @ layer["mlp.down_proj.weight"].T
        return self._norm(hidden, layer["final"])

    def read(self, state: Tensor) -> Tensor:
        """Logits of a normed output."""
        return state @ self.layers[0].get("head", self._head).T

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        mean = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(mean + self.config["rms_norm_eps"]) * weight

    def _attend(self, x: Tensor, layer: Weights) -> Tensor:
        length, dim = len(x), self.config["head_dim"]
        q, k, v = (self._project(x, layer, name) for name in "qkv")
        for name, heads in (("q", q), ("k", k)):
            if f"self_attn.{name}_norm.weight" in layer:
                heads.copy_(self._norm(heads, layer[f"self_attn.{name}_norm.weight"]))
        q, k = self._rotate(q), self._rotate(k)
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(dim)
        back = torch.arange(length)[:, None] - torch.arange(length)[None, :]
        window = self.config.get("sliding_window") or length
        scores = scores.masked_fill((back < 0) | (back >= window), -math.inf)
        attended = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(length, -1)
        return attended @ layer["self_attn.o_proj.weight"].T

    def _project(self, x: Tensor, layer: Weights, name: str) -> Tensor:
        bias = layer.get(f"self_attn.{name}_proj.bias", torch.zeros(1, dtype=torch.float64))
        out = x @ layer[f"self_attn.{name}_proj.weight"].T + bias
        return out.view(len(x), -1, self.config["head_dim"])

    def _rotate(self, x: Tensor) -> Tensor:
        dim, theta = self.config["head_dim"], self.config["rope_parameters"]["rope_theta"]
        frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angles = torch.arange(len(x), dtype=torch.float64)[:, None] * frequencies
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
