"""EAGLE heads once more, as plain torch in double precision: what the papers say, no cache.

Written from Li et al. 2024 (EAGLE) and 2025 (EAGLE-3) and what is told of the flags of 3.1; every
row of every step is computed anew from the head's tensors. Imports nothing of the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True)
class ReferenceHead:
    """A head over a target's features.

    Args:
        config: sizes and flags, flat: as in config.json, without nesting.
        tensors: named as in the `speculators` layout.
        embedding, head: the target's [vocab, hidden].
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    embedding: Tensor
    head: Tensor

    def logits(self, tokens: Sequence[int], taps: Tensor, drafts: Sequence[int]) -> list[Tensor]:
        """Logits of each draft of a chain, given the drafts before it.

        Args:
            tokens: the history, t_0 to t_{L-1}.
            taps: [L - 1, taps * hidden], the target's states at all but the last of them.
            drafts: what follows; the last one is not looked at.
        """
        features = self._project(taps.double())
        known, found = list(tokens[1:]), []
        for draft in drafts:
            state = self._run(torch.tensor(known), features)[-1]
            found.append(self._norm(state, "norm") if self._norms_logits else state)
            found[-1] = found[-1] @ self._get("lm_head.weight", self.head).T
            known.append(draft)
            features = torch.cat([features, state[None]])
        return found

    @property
    def _is_3(self) -> bool:
        return "layers.0.hidden_norm.weight" in self.tensors

    @property
    def _norms_logits(self) -> bool:
        return self._is_3 and not self.config.get("norm_output")

    def _project(self, taps: Tensor) -> Tensor:
        """Features [rows, hidden] of the target's states; EAGLE-1 projects them with the tokens."""
        if not self._is_3 or "fc.weight" not in self.tensors:
            return taps
        if self.config.get("norm_before_fc"):
            taps = self._norm(taps, "input_norm")
        if self.config.get("fc_norm"):
            width = self.tensors["fc_norm.0.weight"].shape[0]
            parts = [self._norm(x, f"fc_norm.{i}") for i, x in enumerate(taps.split(width, -1))]
            taps = torch.cat(parts, -1)
        return self._linear(taps, "fc")

    def _run(self, tokens: Tensor, features: Tensor) -> Tensor:
        """States [rows, hidden] of rows (token i + 1, feature i) at positions i."""
        embedded = self._get("embed_tokens.weight", self.embedding)[tokens]
        if self._is_3:
            normed = self._norm(features, "layers.0.hidden_norm")
            first = torch.cat([self._norm(embedded, "layers.0.input_layernorm"), normed], -1)
            x = normed if self.config.get("norm_before_residual") else features
        else:
            x = first = self._linear(torch.cat([embedded, features], -1), "fc")
        for index in range(self.config["num_hidden_layers"]):
            name = f"layers.{index}"
            inside = first if index == 0 else self._norm(x, f"{name}.input_layernorm")
            x = x + self._attention(inside, name)
            inside = self._norm(x, f"{name}.post_attention_layernorm")
            gate = torch.nn.functional.silu(self._linear(inside, f"{name}.mlp.gate_proj"))
            up = self._linear(inside, f"{name}.mlp.up_proj")
            x = x + self._linear(gate * up, f"{name}.mlp.down_proj")
        return self._norm(x, "norm") if self._is_3 and self.config.get("norm_output") else x

    def _attention(self, x: Tensor, name: str) -> Tensor:
        dim, num_heads = self.config["head_dim"], self.config["num_attention_heads"]
        q, k, v = (
            self._linear(x, f"{name}.self_attn.{one}_proj").unflatten(-1, (-1, dim)).transpose(0, 1)
            for one in "qkv"
        )
        if f"{name}.self_attn.q_norm.weight" in self.tensors:
            q = self._norm(q, f"{name}.self_attn.q_norm")
            k = self._norm(k, f"{name}.self_attn.k_norm")
        positions = torch.arange(len(x), dtype=torch.double)
        angles = positions[:, None] * self.config["rope_theta"] ** (
            -torch.arange(0, dim, 2, dtype=torch.double) / dim
        )
        q, k = _rotated(q, angles), _rotated(k, angles)
        k, v = (one.repeat_interleave(num_heads // len(one), 0) for one in (k, v))
        hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(1, 2) / dim**0.5).masked_fill(hidden, float("-inf"))
        attended = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        return self._linear(attended, f"{name}.self_attn.o_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.tensors[f"{name}.weight"].double().T
        return y + self.tensors[f"{name}.bias"].double() if f"{name}.bias" in self.tensors else y

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.tensors[f"{name}.weight"].double()

    def _get(self, name: str, otherwise: Tensor) -> Tensor:
        return self.tensors.get(name, otherwise).double()


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def target_states(model: Any, tokens: Sequence[int], taps: Sequence[int | str]) -> Tensor:
    """[len(tokens), taps * hidden] of a transformers model: after so many layers, or `final`."""
    found: dict[int | str, Tensor] = {}

    def keep(tap: int | str) -> Any:
        def hook(module: Any, given: Any, output: Any) -> None:
            found[tap] = (output[0] if isinstance(output, tuple) else output).reshape(
                len(tokens), -1
            )

        return hook

    modules = {0: model.model.embed_tokens, "final": model.model.norm}
    modules |= {index + 1: layer for index, layer in enumerate(model.model.layers)}
    handles = [module.register_forward_hook(keep(tap)) for tap, module in modules.items()]
    with torch.no_grad():
        model(torch.tensor([list(tokens)]))
    for handle in handles:
        handle.remove()
    return torch.cat([found[tap] for tap in taps], -1)
