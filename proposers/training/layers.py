"""The parts of a trainable draft: RMS norm, rotation, attention over chains, MLP, a layer.

Parameters are named as in Llama checkpoints. Attention serves the training-time test of EAGLE-3
(2503.01840, section 3.2): row a is the chain of drafts that starts at position a, and in step s it
stands at position a + s. Knows nothing of what goes in or what is predicted.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from proposers.training.target import LayerSizes

Tensor = torch.Tensor
Rotation = tuple[Tensor, Tensor]  # cos and sin, [L, head_dim // 2] fp32
# What a layer's attention has seen, a step each: keys and values [B, kv_heads, L, head_dim]
Chain = list[tuple[Tensor, Tensor]]


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        normed: Tensor = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._eps)
        return normed * self.weight


def rotation(sizes: LayerSizes, positions: Tensor) -> Rotation:
    """Cos and sin of every angle at positions [L]."""
    exponents = torch.arange(0, sizes.head_dim, 2, device=positions.device).float() / sizes.head_dim
    angles = positions[:, None].float() * (1.0 / sizes.rope_theta**exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """[..., L, head_dim] with dimension i turned against i + head_dim // 2."""
    cos, sin = by
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Attention of rows to the true history before them and to the own chain behind it.

    In step 0 it is causal. In step s row a sees the step-0 keys of rows <= a, which come from the
    target's features, and the step-1 to step-s keys of row a, which come from the draft itself.

    Args:
        sizes: of the layer.
        input_size: width of what queries, keys and values are made of.
    """

    def __init__(self, sizes: LayerSizes, input_size: int) -> None:
        super().__init__()
        self._sizes = sizes
        q_size, kv_size = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        self.q_proj = nn.Linear(input_size, q_size, bias=False)
        self.k_proj = nn.Linear(input_size, kv_size, bias=False)
        self.v_proj = nn.Linear(input_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, sizes.hidden_size, bias=False)

    def forward(self, x: Tensor, by: Rotation, chain: Chain) -> Tensor:
        """[B, L, hidden] of x [B, L, input_size]; this step's keys and values join the chain."""
        query = rotate(self._heads(self.q_proj(x)), by)
        key, value = rotate(self._heads(self.k_proj(x)), by), self._heads(self.v_proj(x)).float()
        groups = self._sizes.num_heads // self._sizes.num_kv_heads
        chain.append((key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)))
        first_key, first_value = chain[0]
        if len(chain) == 1:
            attended = functional.scaled_dot_product_attention(
                query, first_key, first_value, is_causal=True
            )
        else:
            attended = self._attend_chain(query, chain)
        output: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return output

    def _attend_chain(self, query: Tensor, chain: Chain) -> Tensor:
        (first_key, first_value), *own = chain
        length, scale = query.shape[2], 1 / math.sqrt(self._sizes.head_dim)
        history = (query @ first_key.transpose(-1, -2)).float()  # [B, heads, L, L]
        later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        history = history.masked_fill(later, -torch.inf)
        steps = [(query * key).sum(-1, keepdim=True).float() for key, _ in own]
        weights = functional.softmax(torch.cat((history, *steps), dim=-1) * scale, dim=-1)
        attended = weights[..., :length] @ first_value
        for index, (_, value) in enumerate(own, length):
            attended = attended + weights[..., index : index + 1] * value
        return attended

    def _heads(self, x: Tensor) -> Tensor:
        """[B, heads, L, head_dim] of [B, L, heads * head_dim]."""
        heads: Tensor = x.unflatten(-1, (-1, self._sizes.head_dim))
        return heads.transpose(1, 2)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        hidden, inner = sizes.hidden_size, sizes.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class Layer(nn.Module):
    """Attention and MLP around a residual stream. What goes into attention is the caller's."""

    def __init__(self, sizes: LayerSizes, input_size: int) -> None:
        super().__init__()
        self.self_attn = Attention(sizes, input_size)
        self.post_attention_layernorm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.mlp = MLP(sizes)

    def forward(self, residual: Tensor, x: Tensor, by: Rotation, chain: Chain) -> Tensor:
        """[B, L, hidden]: the residual stream with both added."""
        hidden: Tensor = residual + self.self_attn(x, by, chain)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class LlamaLayer(Layer):
    """A layer of an ordinary decoder, which norms its own input."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__(sizes, sizes.hidden_size)
        self.input_layernorm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)

    def run(self, hidden: Tensor, by: Rotation, chain: Chain) -> Tensor:
        """[B, L, hidden] of the same."""
        output: Tensor = self(hidden, self.input_layernorm(hidden), by, chain)
        return output
