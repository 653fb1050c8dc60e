"""LayerOps: the operations that a decoder is made of, as ops over caller-owned tensors.

Owns the interface only. Implementations: `native_ops.py` (own C++ kernels), `triton_ops.py` (own
Triton kernels), `torch_ops.py` (plain torch, compiled by inductor or not). All work row by row: a
row's bits never depend on the other rows of the call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from graphengine.models.config import ModelConfig
from graphengine.models.rope import rope_tables

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation tables and sizes that `rope_write` needs."""

    cos: Tensor  # [max_model_len, head_dim // 2] fp32
    sin: Tensor  # [max_model_len, head_dim // 2] fp32
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int


def make_rope(
    config: ModelConfig, max_model_len: int, *, block_size: int, device: torch.device
) -> Rope:
    """The rotation of a model, for a cache of that block size."""
    cos, sin = rope_tables(config, max_model_len)
    return Rope(
        cos=cos.contiguous().to(device),
        sin=sin.contiguous().to(device),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
    )


class LayerOps(Protocol):
    """Row-wise layer operations. Activations are fp32, weights and KV in the model dtype. Outputs
    come first.
    """

    def embed(self, out: Tensor, table: Tensor, token_ids: Tensor) -> None:
        """out [T, hidden] = table[token_ids]; token_ids [T] int32, all in [0, vocab)."""

    def rms_norm(self, out: Tensor, x: Tensor, weight: Tensor) -> None:
        """out [T, hidden] = x / sqrt(mean(x^2) + eps) * weight [hidden] fp32; x may be out."""

    def linear(
        self,
        out: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        add: bool = False,
    ) -> None:
        """out [T, n] = x [T, k] @ weight [n, k]^T (+ bias [n] fp32); with `add` the result is added
        into out.
        """

    def gate_up(self, out: Tensor, x: Tensor, weight: Tensor) -> None:
        """out [T, i] = silu(x @ gate^T) * (x @ up^T); weight [2 i, k]: gate's rows, then up's."""

    def rope_write(
        self,
        qkv: Tensor,
        kv_cache: Tensor,
        rope: Rope,
        positions: Tensor,
        slot_mapping: Tensor,
        qk_norm: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Normalise (optional) and rotate q and k of qkv [T, (heads + 2 kv_heads) * dim] in place,
        write k and v.

        kv_cache [num_blocks, 2, block_size, kv_heads, dim]; positions, slot_mapping [T] int32.
        Padding rows carry slots of block 0, the null block, which nobody reads: whether they are
        stored there is up to the implementation.
        """

    def argmax(self, out: Tensor, logits: Tensor) -> None:
        """out [T] int32 = index of the largest logit of each row; ties go to the lowest index, NaN
        never wins, a row of NaN alone gives 0.
        """
