"""Reference attention: the definition, in plain torch, on one screen.

What every other backend is tested against. Gathers whole contexts, repeats the heads and makes the
chain mask explicit, all in float64; it cannot be captured, and is not meant to be fast.
"""

from __future__ import annotations

import torch

from graphengine.attention.base import AttentionBatch, AttentionShape, HostRows

Tensor = torch.Tensor


class ReferenceAttention:
    """softmax(q k^T / sqrt(dim) + mask) v over each request's own pages.

    Requests are padded to the rows of the longest, k + 1 in a verify step. Slots that none of a
    request's rows may see have no effect, NaN in them included.
    """

    name = "reference"

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape

    def plan(self, batch: AttentionBatch, host: HostRows) -> None:
        """Nothing to prepare."""

    def run(self, out: Tensor, qkv: Tensor, kv_cache: Tensor, batch: AttentionBatch) -> None:
        shape = self._shape
        starts = batch.query_start_loc.long()
        offsets = torch.arange(int(starts.diff().max()))
        live = offsets < starts.diff()[:, None]  # [batch, k + 1]
        rows = torch.where(live, starts[:-1, None] + offsets, 0)
        positions = torch.where(live, batch.positions.long()[rows], 0)
        length = int(positions.max()) + 1  # past + k + 1 of the longest request
        mask = chain_mask(positions, length, shape.sliding_window)

        q = qkv.double().view(len(qkv), -1, shape.head_dim)[rows, : shape.num_heads].transpose(1, 2)
        keys, values = self._pages(kv_cache, batch.block_table, length)
        unseen = ~mask.any(2)[..., None]
        keys, values = keys.masked_fill(unseen, 0), values.masked_fill(unseen, 0)
        scores = q @ keys.transpose(2, 3) / shape.head_dim**0.5  # [batch, heads, k + 1, length]
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        attended = (weights @ values).transpose(1, 2)  # [batch, k + 1, heads, dim]
        out[rows[live]] = attended[live].flatten(1).to(out.dtype)

    def _pages(self, kv_cache: Tensor, block_table: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """K and V of each request's first `length` positions, [batch, heads, length, dim]."""
        shape = self._shape
        num_blocks = -(-length // shape.block_size)
        pages = kv_cache[block_table[:, :num_blocks].long()].double()
        repeats = shape.num_heads // shape.num_kv_heads
        keys, values = (
            pages[:, :, part].flatten(1, 2)[:, :length].repeat_interleave(repeats, 2)
            for part in (0, 1)
        )
        return keys.transpose(1, 2), values.transpose(1, 2)


def chain_mask(positions: Tensor, length: int, sliding_window: int | None = None) -> Tensor:
    """What each row may see: bool [batch, 1, k + 1, length], with length = past + k + 1.

    A row at position p sees the positions up to p, and above p - window where there is one. So rows
    at past, past + 1, ... see all of the history; draft i sees itself and the drafts before it.

    Args:
        positions: [batch, k + 1], of the last known token and of its drafts.
    """
    columns = torch.arange(length)
    mask = columns <= positions[..., None]
    if sliding_window is not None:
        mask &= columns > positions[..., None] - sliding_window
    return mask[:, None]
