"""The attention contract: `plan` outside the graph, `run` inside it.

A batch is described by tensors at fixed addresses. Row t belongs to the request whose
`query_start_loc` range holds it and attends the cache positions <= positions[t] of that request:
that is the causal mask of a prefill chunk and the chain mask of a verify block alike (history
visible to all rows, draft i sees drafts < i).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Per-step metadata, written before `run` by the host or the step's first op, read by the
    kernel.
    """

    block_table: (
        torch.Tensor
    )  # [num_reqs, max_blocks] int32; unallocated entries are 0, the null block
    query_start_loc: (
        torch.Tensor
    )  # [num_reqs + 1] int32; rows of request r are [loc[r], loc[r + 1])
    positions: torch.Tensor  # [num_tokens] int32, absolute
    max_query_len: int  # no request has more rows; the same for every batch of a captured cell


@dataclass(frozen=True, slots=True)
class HostRows:
    """The same metadata as the host has it, for backends that plan by lengths.

    The arrays are rewritten before every step: what a plan keeps of them it copies.
    """

    block_table: IntArray  # [num_reqs, max_blocks]
    query_start_loc: IntArray  # [num_reqs + 1]
    # [num_reqs] past and own rows; where a step is under way that the host has not read yet, the
    # most that it can come to
    seq_lens: IntArray


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes that do not change between steps."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    sliding_window: int | None  # row at p attends (p - window, p]


class AttentionBackend(Protocol):
    """Causal attention over a paged cache that already holds the step's own K and V."""

    name: str

    def plan(self, batch: AttentionBatch, host: HostRows) -> None:
        """Host-side preparation for the metadata now in place; called before every replay, never
        captured.
        """

    def run(
        self, out: torch.Tensor, qkv: torch.Tensor, kv_cache: torch.Tensor, batch: AttentionBatch
    ) -> None:
        """out [T, heads * dim] fp32 from the q part of qkv [T, (heads + 2 kv_heads) * dim] fp32 and
        kv_cache [num_blocks, 2, block_size, kv_heads, dim]. Captured: calls only ops."""


def plan(attention: AttentionBackend, batch: AttentionBatch) -> None:
    """Plan for metadata that only the device has so far; copies it to the host."""
    table, starts = batch.block_table.cpu().numpy(), batch.query_start_loc.cpu().numpy()
    positions, num_rows = batch.positions.cpu().numpy(), np.diff(starts)
    first = positions[np.minimum(starts[:-1], len(positions) - 1)]
    attention.plan(batch, HostRows(table, starts, np.where(num_rows > 0, first + num_rows, 0)))
