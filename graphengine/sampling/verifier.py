"""Greedy verification: which drafts the target confirms, where the block stops, what is emitted.

Owns the rule, twice: `verify_reference`, plain loops that fit on a screen, and `greedy_verify`, the
same rule over fixed-shape integer tensors, which is captured (`cpu.py` has it as a C++ kernel).
Stops truncate here, before anything is committed. Knows nothing of logits, KV or requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Tensor = torch.Tensor

# `greedy_verify` or another form of it, callable in a captured step.
GreedyVerify = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
NO_STOP = -2  # pads a row of stop ids; no token has this id


def packed_width(max_draft_tokens: int) -> int:
    """Columns of `packed`: number of emitted tokens, how many were drafts, then their ids."""
    return 2 + max_draft_tokens + 1


def verify_reference(
    target_ids: Sequence[int],
    draft_ids: Sequence[int],
    stop_ids: Sequence[int],
    max_new_tokens: int,
) -> tuple[list[int], int]:
    """Tokens that one request emits, and how many of them were drafts.

    Args:
        target_ids: the target's token after the last known token and after each draft; one more
            than drafts.
        draft_ids: the proposed tokens.
        stop_ids: ids that end the request; the stop token itself is emitted.
        max_new_tokens: room left for the request, >= 1.
    """
    emitted: list[int] = []
    num_accepted = 0
    for index, token in enumerate(target_ids):
        confirmed = index < len(draft_ids) and draft_ids[index] == token
        emitted.append(token)  # a confirmed draft, else the recovered token, else the bonus token
        num_accepted += confirmed
        if not confirmed or token in stop_ids or len(emitted) == max_new_tokens:
            break
    return emitted, num_accepted


def greedy_verify(
    packed: Tensor,
    target_ids: Tensor,
    token_ids: Tensor,
    query_len: Tensor,
    num_draft_tokens: Tensor,
    stop_ids: Tensor,
    max_new_tokens: Tensor,
) -> None:
    """Write `packed` [num_rows, k_max + 3] int32: number of emitted tokens, how many of them were
    drafts, then their ids, -1 beyond.

    Shapes do not depend on the cell, so this is compiled once: rows of all requests are looked at,
    and the cell's `query_len` [1] says where a request's tokens start.

    Args:
        target_ids: [T] int32, the target's token for each row.
        token_ids: [T] int32, the step's input; drafts are rows 1.. of each request.
        num_draft_tokens: [num_rows] int32, live drafts; 0 for padding.
        stop_ids: [num_rows, max_stop_ids] int32, NO_STOP beyond the request's own.
        max_new_tokens: [num_rows] int32, room left; padding rows: 1.
    """
    num_rows, width = packed.shape
    positions = torch.arange(width - 2, dtype=torch.int32)  # [k_max + 1]
    starts = torch.arange(num_rows, dtype=torch.int32)[:, None] * query_len  # [num_rows, 1]
    last = query_len - 1
    targets = target_ids[starts + torch.minimum(positions, last)]  # [num_rows, k_max + 1]
    drafts = token_ids[starts + torch.minimum(positions + 1, last)]
    confirmed = (targets == drafts) & (positions < num_draft_tokens[:, None])
    stops = (targets[:, :, None] == stop_ids[:, None, :]).any(-1)
    # Each rule names the last position that is emitted; the earliest rule wins.
    mismatch = torch.where(confirmed, width, positions).amin(-1)
    stop = torch.where(stops, positions, width).amin(-1)
    count = torch.minimum(torch.minimum(mismatch, stop) + 1, max_new_tokens)
    packed[:, 0] = count
    packed[:, 1] = torch.minimum(mismatch, count)
    packed[:, 2:] = torch.where(positions < count[:, None], targets, -1)
