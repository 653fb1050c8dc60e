"""Step batches: writes what the host knows of a step into its inputs, live requests and padding.

Owns the padding policy of the host's part: which requests a cell holds, how many drafts each may
have. Their rows (every live request has exactly `query_len`; those beyond its drafts, and those of
padding requests, carry token 0 at the null block, so whatever they compute reaches nobody) are made
of it by the step itself. Reads request rows, never changes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from capture.edge import Array, HostViews
from capture.shapes import ShapeKey
from graphengine.attention.base import HostRows
from graphengine.request import Request
from graphengine.request_state import IntArray, RequestState
from graphengine.sampling.row_hooks import apply_logits_processors, apply_prefix_masks
from graphengine.sampling.verifier import NO_STOP
from graphengine.scheduler import PrefillChunk
from proposers.device_draft import DeviceDraft

Tensor = torch.Tensor


def prefill_rows(views: HostViews, chunks: Sequence[PrefillChunk]) -> HostRows:
    """What attention may plan by, of chunks that `write_prefill` has written."""
    lens = np.array([chunk.start + chunk.num_tokens for chunk in chunks], dtype=np.int32)
    return HostRows(views["block_table"], views["query_start_loc"], lens)


# The inputs that the functions below write.
PREFILL_INPUTS = ("token_ids", "positions", "slot_mapping", "block_table", "query_start_loc")
DECODE_INPUTS = (
    "state_rows",
    "allowed_drafts",
    "most_new_tokens",
    "draft_token_ids",
    "block_table",
    "query_start_loc",
    "query_len",
    "stop_ids",
)
SAMPLED_INPUTS = (*DECODE_INPUTS, "mask")
ANY_NUMBER = (1 << 31) - 1  # of new tokens: only the request's limit holds
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
    on_device: DeviceDraft | None = None  # drafts that take the place of `draft_token_ids`

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
    # idx_mapping
    rows = np.array([state.row_of(request) for request in batch.requests], dtype=np.int32)
    query_len = key.query_len
    drafts = views["draft_token_ids"].reshape(-1, query_len)
    width = min(query_len - 1, batch.draft_token_ids.shape[1])
    drafts[:] = 0
    drafts[: len(rows), :width] = batch.draft_token_ids[:, :width]
    _fill(views["state_rows"], rows, state.device.padding_row)
    _fill(views["allowed_drafts"], batch.num_draft_tokens, 0)
    views["most_new_tokens"][:] = ANY_NUMBER
    _fill(views["block_table"], state.block_table[rows], 0)
    views["query_start_loc"][:] = np.arange(key.num_reqs + 1, dtype=np.int32) * query_len
    views["query_len"][0] = query_len
    _fill(views["stop_ids"], state.stop_ids[rows], NO_STOP)


def decode_rows(
    views: HostViews, key: ShapeKey, state: RequestState, requests: Sequence[Request]
) -> HostRows:
    """What attention may plan by, of a cell that `write_decode` has filled."""
    lens = np.full(key.num_reqs, key.query_len, dtype=np.int32)
    lens[: len(requests)] += state.num_tokens[[state.row_of(one) for one in requests]] - 1
    return HostRows(views["block_table"], views["query_start_loc"], lens)


def write_sampled(views: HostViews, key: ShapeKey, state: RequestState, batch: DecodeBatch) -> None:
    """Fill what only the sampler reads: what may come in each row.

    Row j of a request comes after its output and j drafts. Comes after `write_decode`, whose
    `most_new_tokens` is lowered where hooks end a block early.

    Raises:
        ValueError: see `apply_prefix_masks`.
    """
    sampler = state.device.sampler
    rows = [state.row_of(request) for request in batch.requests]
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


def write_custom(views: HostViews, key: ShapeKey, batch: DecodeBatch, logits: Array) -> None:
    """Fill what the step goes on from: the model's logits, and those that hooks make of them.

    Comes after `write_sampled`.

    Args:
        logits: [num_tokens, vocab] of the cell, as the model has computed them.

    Raises:
        ValueError: see `apply_logits_processors`.
    """
    views["raw_logits"][:] = logits
    views["custom_logits"][:] = logits
    custom = views["custom_logits"].reshape(key.num_reqs, key.query_len, -1)
    masks = views["mask"].reshape(key.num_reqs, key.query_len, -1)
    for index, request in enumerate(batch.requests):
        if request.params.processors:
            drafts = batch.drafts_of(index)
            count = apply_logits_processors(custom[index], masks[index], request, drafts)
            _end_after(views, index, count)


def _end_after(views: HostViews, index: int, count: int) -> None:
    """Let a request emit no more than its first `count` rows."""
    room = views["most_new_tokens"]
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
