"""The heads decoded one row at a time, with a list of keys and values: what the unroll must equal.

Written from the formats' description, over a head's parameters by name; shares no code with
`proposers.training`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from proposers.training import Eagle3Flags, LayerSizes

Tensor = torch.Tensor
Weights = Mapping[str, Tensor]
Step = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


@dataclass(kw_only=True)
class ChainHead:
    """One head: `first` makes a state of the target's, `step` a row and the next state."""

    sizes: LayerSizes
    weights: Weights
    first: Callable[[Tensor, Tensor], Tensor]
    step: Step
    cache: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean() + eps).sqrt() * weight


def turn(x: Tensor, position: int, sizes: LayerSizes) -> Tensor:
    """[heads, head_dim] rotated, each pair (i, i + half) on its own."""
    half = sizes.head_dim // 2
    turned = x.clone()
    for i in range(half):
        angle = position / sizes.rope_theta ** (2 * i / sizes.head_dim)
        a, b = x[:, i], x[:, i + half]
        turned[:, i] = a * math.cos(angle) - b * math.sin(angle)
        turned[:, i + half] = b * math.cos(angle) + a * math.sin(angle)
    return turned


def layer(head: ChainHead, prefix: str, residual: Tensor, x: Tensor, position: int) -> Tensor:
    """A Llama layer for one row; its key and value join the head's list."""
    sizes, cache = head.sizes, head.cache

    def project(name: str, of: Tensor) -> Tensor:
        return head.weights[f"{prefix}{name}.weight"] @ of

    def heads(name: str) -> Tensor:
        return project(f"self_attn.{name}_proj", x).view(-1, sizes.head_dim)

    query = turn(heads("q"), position, sizes)
    cache.append((turn(heads("k"), position, sizes), heads("v")))
    outputs = []
    for index in range(sizes.num_heads):
        group = index * sizes.num_kv_heads // sizes.num_heads
        scores = torch.stack([query[index] @ key[group] for key, _ in cache])
        weights = torch.softmax(scores / math.sqrt(sizes.head_dim), dim=0)
        outputs.append(sum(w * value[group] for w, (_, value) in zip(weights, cache, strict=True)))
    hidden = residual + project("self_attn.o_proj", torch.cat(outputs))
    inner = norm(
        hidden, head.weights[f"{prefix}post_attention_layernorm.weight"], sizes.rms_norm_eps
    )
    gate = project("mlp.gate_proj", inner)
    return hidden + project(
        "mlp.down_proj", gate * torch.sigmoid(gate) * project("mlp.up_proj", inner)
    )


def eagle1(sizes: LayerSizes, weights: Weights) -> ChainHead:
    def step(embed: Tensor, state: Tensor, position: int) -> tuple[Tensor, Tensor]:
        mixed = weights["fc.weight"] @ torch.cat((embed, state))
        output = layer(head, "layers.0.", mixed, mixed, position)
        return output, output

    head = ChainHead(sizes=sizes, weights=weights, first=lambda aux, final: final, step=step)
    return head


def eagle3(sizes: LayerSizes, weights: Weights, flags: Eagle3Flags) -> ChainHead:
    eps = sizes.rms_norm_eps

    def first(aux: Tensor, final: Tensor) -> Tensor:
        parts = aux.split(sizes.hidden_size)
        if flags.fc_norm:
            parts = tuple(
                norm(part, weights[f"fc_norm.{i}.weight"], eps) for i, part in enumerate(parts)
            )
        return weights["fc.weight"] @ torch.cat(parts)

    def step(embed: Tensor, state: Tensor, position: int) -> tuple[Tensor, Tensor]:
        normed = norm(state, weights["layers.0.hidden_norm.weight"], eps)
        x = torch.cat((norm(embed, weights["layers.0.input_layernorm.weight"], eps), normed))
        residual = normed if flags.norm_before_residual else state
        output = layer(head, "layers.0.", residual, x, position)
        row = norm(output, weights["norm.weight"], eps)
        return row, row if flags.norm_output else output

    head = ChainHead(sizes=sizes, weights=weights, first=first, step=step)
    return head


def mtp(sizes: LayerSizes, weights: Weights) -> ChainHead:
    prefix, eps = "mtp_layers.0.", sizes.rms_norm_eps

    def step(embed: Tensor, state: Tensor, position: int) -> tuple[Tensor, Tensor]:
        embed = torch.zeros_like(embed) if position == 0 else embed
        hidden = norm(state, weights[f"{prefix}hidden_layernorm.weight"], eps)
        token = norm(embed, weights[f"{prefix}token_layernorm.weight"], eps)
        mixed = weights[f"{prefix}input_proj.weight"] @ torch.cat((hidden, token))
        x = norm(mixed, weights[f"{prefix}input_layernorm.weight"], eps)
        output = layer(head, prefix, mixed, x, position)
        row = norm(output, weights[f"{prefix}final_layernorm.weight"], eps)
        return row, row

    head = ChainHead(sizes=sizes, weights=weights, first=lambda aux, final: final, step=step)
    return head


def decode(
    head: ChainHead, embeds: Tensor, aux: Tensor, final: Tensor, *, start: int, steps: int
) -> list[Tensor]:
    """Rows of the chain behind position `start`, as decoding computes them.

    Args:
        embeds: [T, hidden] of the text's tokens; position p pairs that of token p + 1 with its
            state.
        aux, final: [T, ...], the target's states.
    """
    head.cache.clear()
    for position in range(start + 1):  # history: every state is the target's
        state = head.first(aux[position], final[position])
        row, state = head.step(embeds[position + 1], state, position)
    rows = [row]
    for position in range(start + 1, start + steps):
        row, state = head.step(embeds[position + 1], state, position)
        rows.append(row)
    return rows
