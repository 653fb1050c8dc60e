"""Greedy verification: the rule of `sampling/verifier.py`, a program a request. Integers alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.sampling.verifier import NO_STOP
from graphengine.triton_kernels.chunks import check_contiguous
from graphengine.triton_kernels.specs import KernelSpec

Tensor = torch.Tensor

NO_STOP_ID = tl.constexpr(NO_STOP)


def greedy_verify(
    packed: Tensor,
    target_ids: Tensor,
    token_ids: Tensor,
    query_len: Tensor,
    num_draft_tokens: Tensor,
    stop_ids: Tensor,
    max_new_tokens: Tensor,
) -> None:
    """Write `packed`; arguments are those of `sampling.verifier.greedy_verify`."""
    check_contiguous(packed, target_ids, token_ids, query_len, num_draft_tokens)
    check_contiguous(stop_ids, max_new_tokens)
    num_rows, width = packed.shape
    num_stops = stop_ids.shape[1]
    _verify[(num_rows,)](
        packed,
        target_ids,
        token_ids,
        query_len,
        num_draft_tokens,
        stop_ids,
        max_new_tokens,
        WIDTH=width,
        BLOCK_W=triton.next_power_of_2(width),
        NUM_STOPS=num_stops,
        BLOCK_S=triton.next_power_of_2(num_stops),
        num_warps=1,
    )


@triton.jit
def _verify(
    packed,
    target_ids,
    token_ids,
    query_len,
    num_draft_tokens,
    stop_ids,
    max_new_tokens,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    row = tl.program_id(0)
    length = tl.load(query_len)
    places = tl.arange(0, BLOCK_W)
    mask = places < WIDTH - 2
    first = row * length
    targets = tl.load(target_ids + first + tl.minimum(places, length - 1), mask=mask, other=0)
    drafts = tl.load(token_ids + first + tl.minimum(places + 1, length - 1), mask=mask, other=0)
    confirmed = (targets == drafts) & (places < tl.load(num_draft_tokens + row))
    s = tl.arange(0, BLOCK_S)
    stops = tl.load(stop_ids + row * NUM_STOPS + s, mask=s < NUM_STOPS, other=NO_STOP_ID)
    is_stop = tl.sum((targets[:, None] == stops[None, :]).to(tl.int32), axis=1) > 0
    # Each rule names the last position that is emitted; the earliest rule wins.
    mismatch = tl.min(tl.where(mask & ~confirmed, places, WIDTH))
    stop = tl.min(tl.where(mask & is_stop, places, WIDTH))
    count = tl.minimum(tl.minimum(mismatch, stop) + 1, tl.load(max_new_tokens + row))
    out = packed + row * WIDTH
    tl.store(out, count)
    tl.store(out + 1, tl.minimum(mismatch, count))
    tl.store(out + 2 + places, tl.where(places < count, targets, -1), mask=mask)


COMPILED: tuple[KernelSpec, ...] = (
    KernelSpec(
        "verify",
        _verify,
        dict.fromkeys(_verify.arg_names[:7], "*i32"),
        {"WIDTH": 9, "BLOCK_W": 16, "NUM_STOPS": 64, "BLOCK_S": 64},
        {"num_warps": 1},
    ),
)
