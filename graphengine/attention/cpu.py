"""Attention on CPU by the project's own C++ kernel, in place over the paged cache.

Owns the kernel's arguments and its limits. The kernel walks fixed-size KV chunks and combines them
in order, so a row's bits do not depend on what shares the call; cost grows with the real context.
"""

from __future__ import annotations

import torch

from graphengine.attention.base import AttentionBatch, AttentionShape, HostRows
from graphengine.kernels.library import MAX_HEAD_DIM
from graphengine.kernels.ops import check_contiguous, kernel_suffix, native_op

Tensor = torch.Tensor

# Partials of split-KV attention; larger problems take the one-thread-a-row schedule, with the same
# bits.
SCRATCH_FLOATS = 4 << 20


def check_supported(dtype: torch.dtype, head_dim: int) -> None:
    """Whether the kernel serves a cache of this dtype and head size; builds nothing.

    Raises:
        ValueError: it does not.
    """
    kernel_suffix(dtype)
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim={head_dim}: the attention kernels serve up to {MAX_HEAD_DIM}")


class NativeAttention:
    """See the module docstring.

    Args:
        dtype: of the cache.
        shape: of the heads.
        scratch: that of another one, whose calls these do not overlap; None: its own.
    """

    name = "native"

    def __init__(
        self, dtype: torch.dtype, shape: AttentionShape, scratch: Tensor | None = None
    ) -> None:
        self._op = native_op(f"paged_attention_{kernel_suffix(dtype)}")
        self._shape = shape
        self.scratch = torch.zeros(SCRATCH_FLOATS) if scratch is None else scratch

    def plan(self, batch: AttentionBatch, host: HostRows) -> None:
        """Nothing: the kernel reads lengths and tables from the batch's tensors."""

    def run(self, out: Tensor, qkv: Tensor, kv_cache: Tensor, batch: AttentionBatch) -> None:
        check_contiguous(
            out, qkv, kv_cache, batch.block_table, batch.query_start_loc, batch.positions
        )
        shape = self._shape
        self._op(
            out,
            qkv,
            kv_cache,
            batch.block_table,
            batch.query_start_loc,
            batch.positions,
            batch.block_table.shape[0],
            batch.block_table.shape[1],
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.block_size,
            shape.sliding_window or 0,
            self.scratch,
            self.scratch.numel(),
        )
