"""Attention by the project's own Triton kernels, in place over the paged cache; for GPUs.

Owns the op and its scratch. Lengths and tables are read on the device, so there is nothing to plan.
Kernels and their arithmetic: `triton_kernels/attention.py`.
"""

from __future__ import annotations

import torch

from capture.ops import CompiledOp
from graphengine.attention.base import AttentionBatch, AttentionShape, HostRows
from graphengine.opset import GPU_ATTENTION_FLOATS
from graphengine.triton_kernels.attention import paged_attention

Tensor = torch.Tensor

MAX_HEAD_DIM = 256


class TritonAttention:
    """See the module docstring.

    Args:
        shape: of the heads.
        device: of the tensors.
        scratch: partial sums of chunks that many programs share; calls with more rows, heads and
            context walk a row's chunks in one program, with the same bits. That of another one,
            whose calls these do not overlap; None: its own.

    Raises:
        ValueError: heads that the kernels do not serve.
    """

    name = "triton"

    def __init__(
        self, shape: AttentionShape, device: torch.device, scratch: Tensor | None = None
    ) -> None:
        if shape.head_dim > MAX_HEAD_DIM:
            raise ValueError(
                f"head_dim={shape.head_dim}: the attention kernels serve up to {MAX_HEAD_DIM}"
            )
        self._shape = shape
        self.scratch = (
            torch.zeros(GPU_ATTENTION_FLOATS, device=device) if scratch is None else scratch
        )
        self._op = CompiledOp("paged_attention", self._launch)

    def plan(self, batch: AttentionBatch, host: HostRows) -> None:
        """Nothing: the kernel reads lengths and tables from the batch's tensors."""

    def run(self, out: Tensor, qkv: Tensor, kv_cache: Tensor, batch: AttentionBatch) -> None:
        self._op(
            out,
            qkv,
            kv_cache,
            self.scratch,
            batch.max_query_len,
            batch.block_table,
            batch.query_start_loc,
            batch.positions,
        )

    def _launch(
        self,
        out: Tensor,
        qkv: Tensor,
        kv_cache: Tensor,
        scratch: Tensor,
        max_query_len: int,
        *metadata: Tensor,
    ) -> None:
        block_table, query_start_loc, positions = metadata
        batch = AttentionBatch(block_table, query_start_loc, positions, max_query_len)
        paged_attention(out, qkv, kv_cache, batch, scratch, shape=self._shape)
