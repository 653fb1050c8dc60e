"""Step batches: writes a step's inputs into the static buffers, live rows and padding alike.

Owns the padding policy. Every live request has exactly `query_len` rows; rows beyond its drafts,
and rows of padding requests, carry token 0 at the null block, so whatever they compute reaches
nobody. Reads request rows, never changes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from capture.shapes import ShapeKey
from graphengine.attention.base import HostRows
from graphengine.request import Request
from graphengine.request_state import IntArray, RequestState
from graphengine.sampling.row_hooks import apply_logits_processors, apply_prefix_masks
from graphengine.sampling.verifier import NO_STOP
from graphengine.scheduler import PrefillChunk

Tensor = torch.Tensor
HostViews = Mapping[str, npt.NDArray[Any]]


def host_views(views: Mapping[str, torch.Tensor], names: Sequence[str]) -> HostViews:
    """Numpy views of static buffers on the host."""
    return {name: views[name].numpy() for name in names}


def host_rows(views: HostViews) -> HostRows:
    """What attention may plan by."""
    return HostRows(views["block_table"], views["query_start_loc"], views["positions"])


# The inputs that the functions below write.
PREFILL_INPUTS = ("token_ids", "positions", "slot_mapping", "block_table", "query_start_loc")
DECODE_INPUTS = (*PREFILL_INPUTS, "query_len", "num_draft_tokens", "stop_ids", "max_new_tokens")
SAMPLED_INPUTS = (*DECODE_INPUTS, "state_rows", "mask")
REJECTION_INPUTS = ("draft_probs", "has_draft_probs")
CUSTOM_INPUTS = ("raw_logits", "custom_logits")


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """The requests of a decode step, in batch order, and their drafts."""

    requests: Sequence[Request]
    draft_token_ids: IntArray  # [num_reqs, >= longest draft], anything beyond a request's drafts
    num_draft_tokens: IntArray  # [num_reqs]
    # [num_reqs, >= longest draft, vocab], what drafts were drawn by; None: every one was certain
    draft_probs: npt.NDArray[np.float32] | None = None

    @property
    def longest(self) -> int:
        return int(self.num_draft_tokens.max(initial=0))

    def drafts_of(self, index: int) -> list[int]:
        """Live drafts of one request."""
        drafts: list[int] = self.draft_token_ids[index, : self.num_draft_tokens[index]].tolist()
        return drafts


def write_decode(views: HostViews, key: ShapeKey, state: RequestState, batch: DecodeBatch) -> None:
    """Fill a cell.

    Args:
        views: host views of the cell's inputs.
        key: the cell.
        state: the persistent rows, which must be up to date.
    """
    draft_token_ids, num_draft_tokens = batch.draft_token_ids, batch.num_draft_tokens
    # idx_mapping
    rows = np.array([state.row_of(request) for request in batch.requests], dtype=np.intp)
    num_reqs, query_len = len(rows), key.query_len
    base = state.num_tokens[rows] - 1  # position of the last known token
    offsets = np.arange(query_len, dtype=np.int32)
    live = offsets <= num_draft_tokens[:, None]  # [num_reqs, query_len]
    positions = np.minimum(base[:, None] + offsets, state.token_ids.shape[1] - 1)

    tokens = np.zeros((num_reqs, query_len), dtype=np.int32)
    tokens[:, 0] = state.token_ids[rows, base]
    width = min(query_len - 1, draft_token_ids.shape[1])
    tokens[:, 1 : 1 + width] = draft_token_ids[:, :width]
    tokens[~live] = 0

    table = state.block_table[rows]
    slots = np.take_along_axis(table, positions // state.block_size, axis=1) * state.block_size
    slots += positions % state.block_size
    slots[~live] = 0

    _fill(views["token_ids"].reshape(-1, query_len), tokens, 0)
    _fill(views["positions"].reshape(-1, query_len), positions, 0)
    _fill(views["slot_mapping"].reshape(-1, query_len), slots, 0)
    _fill(views["block_table"], table, 0)
    views["query_start_loc"][:] = np.arange(key.num_reqs + 1, dtype=np.int32) * query_len
    views["query_len"][0] = query_len
    _fill(views["num_draft_tokens"], num_draft_tokens, 0)
    _fill(views["stop_ids"], state.stop_ids[rows], NO_STOP)
    _fill(views["max_new_tokens"], state.limit[rows] - state.num_tokens[rows], 1)


def write_sampled(views: HostViews, key: ShapeKey, state: RequestState, batch: DecodeBatch) -> None:
    """Fill what only the sampler reads: whose rows they are, and what may come in each.

    Row j of a request comes after its output and j drafts. Comes after `write_decode`, whose
    `max_new_tokens` is lowered where hooks end a block early.

    Raises:
        ValueError: see `apply_prefix_masks`.
    """
    sampler = state.sampler
    rows = [state.row_of(request) for request in batch.requests]
    _fill(views["state_rows"], np.array(rows, dtype=np.int32), sampler.padding_row)
    masks = views["mask"].reshape(key.num_reqs, key.query_len, -1)
    offsets = np.arange(key.query_len, dtype=np.int32)
    for index, (row, request) in enumerate(zip(rows, batch.requests, strict=True)):
        if sampler.has_mask(row):
            masks[index] = sampler.mask(row, request.num_output_tokens + offsets)
        else:
            masks[index] = -1
        if request.params.has_prefix_mask:
            drafts = batch.drafts_of(index)
            count = apply_prefix_masks(masks[index], request, drafts, sampler.vocab_size)
            _end_after(views, index, count)
    masks[len(rows) :] = -1


def write_custom(views: HostViews, key: ShapeKey, batch: DecodeBatch, logits: Tensor) -> None:
    """Fill what the step goes on from: the model's logits, and those that hooks make of them.

    Comes after `write_sampled`.

    Args:
        logits: [num_tokens, vocab] of the cell, as the model has computed them.

    Raises:
        ValueError: see `apply_logits_processors`.
    """
    views["raw_logits"][:] = logits.numpy()
    views["custom_logits"][:] = logits.numpy()
    custom = views["custom_logits"].reshape(key.num_reqs, key.query_len, -1)
    masks = views["mask"].reshape(key.num_reqs, key.query_len, -1)
    for index, request in enumerate(batch.requests):
        if request.params.processors:
            drafts = batch.drafts_of(index)
            count = apply_logits_processors(custom[index], masks[index], request, drafts)
            _end_after(views, index, count)


def _end_after(views: HostViews, index: int, count: int) -> None:
    """Let a request emit no more than its first `count` rows."""
    room = views["max_new_tokens"]
    room[index] = min(room[index], count)


def write_draft_probs(views: HostViews, key: ShapeKey, batch: DecodeBatch) -> None:
    """Fill the distributions that drafts were drawn from: row j has that of the draft after it."""
    num_reqs, draft_probs = len(batch.requests), batch.draft_probs
    views["has_draft_probs"][:] = 0
    if draft_probs is not None:
        views["has_draft_probs"][:num_reqs] = 1
        width = min(key.query_len - 1, draft_probs.shape[1])
        rows = views["draft_probs"].reshape(key.num_reqs, key.query_len, -1)
        rows[:num_reqs, :width] = draft_probs[:, :width]


def write_prefill(views: HostViews, state: RequestState, chunks: Sequence[PrefillChunk]) -> None:
    """Fill a varlen prefill of the chunks, exactly as many rows as they have tokens."""
    end = 0
    views["query_start_loc"][0] = 0
    for index, chunk in enumerate(chunks):
        row = state.row_of(chunk.request)
        start, end = end, end + chunk.num_tokens
        positions = np.arange(chunk.start, chunk.start + chunk.num_tokens, dtype=np.int32)
        blocks = state.block_table[row, positions // state.block_size]
        views["token_ids"][start:end] = state.token_ids[row, positions]
        views["positions"][start:end] = positions
        views["slot_mapping"][start:end] = blocks * state.block_size + positions % state.block_size
        views["block_table"][index] = state.block_table[row]
        views["query_start_loc"][index + 1] = end


def _fill(view: IntArray, live: IntArray, fill: int) -> None:
    view[: len(live)] = live
    view[len(live) :] = fill
