"""Reference attention: the definition, in plain torch, on one screen. For tests; materialises
everything.

The chain mask is explicit: `[num_rows, past + num_rows]`, history visible to all rows, draft i
seeing drafts < i.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from graphengine.attention.base import AttentionBatch, AttentionShape

Tensor = torch.Tensor


class ReferenceAttention:
    """Gathers each request's pages and computes softmax(q k^T / sqrt(dim) + mask) v in float64."""

    name = "reference"

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape

    def plan(self, batch: AttentionBatch) -> None:
        """Nothing to prepare."""

    def run(self, out: Tensor, qkv: Tensor, kv_cache: Tensor, batch: AttentionBatch) -> None:
        shape = self._shape
        starts = batch.query_start_loc.tolist()
        for request, (first, last) in enumerate(pairwise(starts)):
            positions = batch.positions[first:last].long()
            length = int(positions.max()) + 1
            keys, values = self._pages(kv_cache, batch.block_table[request], length)
            q = qkv[first:last, : shape.num_heads * shape.head_dim].double()
            q = q.view(last - first, shape.num_heads, shape.head_dim)
            scores = torch.einsum("qhd,khd->hqk", q, keys) / shape.head_dim**0.5
            scores = scores.masked_fill(
                ~chain_mask(positions, length, shape.sliding_window), -torch.inf
            )
            attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
            out[first:last] = attended.reshape(last - first, -1).float()

    def _pages(self, kv_cache: Tensor, block_ids: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """K and V of the first `length` positions, [length, heads, dim] float64, heads repeated."""
        shape = self._shape
        pages = kv_cache[block_ids[: -(-length // shape.block_size)].long()].double()
        repeats = shape.num_heads // shape.num_kv_heads
        keys, values = (
            pages[:, part].flatten(0, 1)[:length].repeat_interleave(repeats, dim=1)
            for part in (0, 1)
        )
        return keys, values


def chain_mask(positions: Tensor, length: int, sliding_window: int | None) -> Tensor:
    """[num_rows, length] bool: row at position p sees positions <= p, and > p - window if there is
    one.
    """
    columns = torch.arange(length)
    mask = columns <= positions[:, None]
    if sliding_window is not None:
        mask &= columns > positions[:, None] - sliding_window
    return mask
