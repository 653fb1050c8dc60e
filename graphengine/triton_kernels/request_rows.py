"""A step's first and last kernel on a GPU: the rule of `kernels/rows.cpp`, a program a request.

Integers alone, and a request's numbers depend on its own row and place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.device_rows import DeviceRows
from graphengine.sampling.settings import DTYPE, PENALTIES
from graphengine.triton_kernels.specs import KernelSpec

Tensor = torch.Tensor

SETTINGS_WORDS = tl.constexpr(DTYPE.itemsize // 4)
FLAGS_WORD = tl.constexpr(DTYPE.fields["flags"][1] // 4)  # type: ignore[index]
COUNTED = tl.constexpr(PENALTIES)


def prepare_rows(
    written: list[Tensor], read: list[Tensor], rows: DeviceRows, *, block: int
) -> None:
    """Write a cell's inputs.

    Args:
        written, read: the buffers of `row_ops.PREPARED` and `PREPARED_FROM`, in that order.
        block: slots of a KV block.
    """
    token_ids, table = written[0], read[-1]
    num_reqs, max_blocks = table.shape
    query_len = len(token_ids) // num_reqs
    _prepare[(len(read[0]),)](
        *written,
        *read,
        rows.num_tokens,
        rows.limits,
        rows.token_ids,
        num_reqs,
        QUERY_LEN=query_len,
        BLOCK_Q=triton.next_power_of_2(query_len),
        MAX_LEN=rows.max_model_len,
        TABLE_STRIDE=max_blocks,
        BLOCK_SIZE=block,
        PADDING_ROW=rows.padding_row,
    )


def commit_rows(packed: Tensor, state_rows: Tensor, rows: DeviceRows, num_reqs: int) -> None:
    """Append what a cell emits to the rows of its requests."""
    width = packed.shape[1]
    _commit[(num_reqs,)](
        rows.token_ids,
        rows.num_tokens,
        rows.sampler.counts,
        packed,
        state_rows,
        rows.sampler.settings,
        WIDTH=width,
        BLOCK_W=triton.next_power_of_2(width),
        MAX_LEN=rows.max_model_len,
        VOCAB=rows.sampler.vocab_size,
        PADDING_ROW=rows.padding_row,
    )


@triton.jit(do_not_specialize=["num_reqs"])
def _prepare(
    token_ids,
    positions,
    slot_mapping,
    num_draft_tokens,
    max_new_tokens,
    state_rows,
    allowed_drafts,
    most_new_tokens,
    draft_token_ids,
    block_table,
    num_tokens,
    limits,
    history,
    num_reqs,
    QUERY_LEN: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    MAX_LEN: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDING_ROW: tl.constexpr,
):
    i = tl.program_id(0)
    row = tl.load(state_rows + i, mask=i < num_reqs, other=PADDING_ROW)
    padding = row == PADDING_ROW
    known = tl.load(num_tokens + row)
    room = tl.where(padding, 0, tl.maximum(tl.load(limits + row) - known, 0))
    drafts = tl.minimum(tl.load(allowed_drafts + i), tl.maximum(room - 1, 0))
    most = tl.minimum(room, tl.load(most_new_tokens + i))
    tl.store(num_draft_tokens + i, tl.where(padding, 0, drafts))
    tl.store(max_new_tokens + i, tl.where(padding, 1, most))

    j = tl.arange(0, BLOCK_Q)
    mask = (j < QUERY_LEN) & (i < num_reqs)
    live = mask & (room > 0) & (j <= drafts)
    last = tl.where(padding, 0, known - 1)
    position = tl.where(padding, 0, tl.minimum(last + j, MAX_LEN - 1))
    block = tl.load(block_table + i * TABLE_STRIDE + position // BLOCK_SIZE, mask=mask, other=0)
    first = tl.load(history + row.to(tl.int64) * MAX_LEN + last)
    t = i * QUERY_LEN + j
    draft = tl.load(draft_token_ids + t - 1, mask=live & (j > 0), other=0)
    token = tl.where(j == 0, first, draft)
    tl.store(token_ids + t, tl.where(live, token, 0), mask=mask)
    tl.store(positions + t, position, mask=mask)
    slot = tl.where(live, block * BLOCK_SIZE + position % BLOCK_SIZE, 0)
    tl.store(slot_mapping + t, slot, mask=mask)


@triton.jit
def _commit(
    history,
    num_tokens,
    counts,
    packed,
    state_rows,
    settings,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    MAX_LEN: tl.constexpr,
    VOCAB: tl.constexpr,
    PADDING_ROW: tl.constexpr,
):
    i = tl.program_id(0)
    row = tl.load(state_rows + i).to(tl.int64)
    if row != PADDING_ROW:
        count = tl.load(packed + i * WIDTH)
        known = tl.load(num_tokens + row)
        j = tl.arange(0, BLOCK_W)
        emitted = tl.load(packed + i * WIDTH + 2 + j, mask=j < count, other=0)
        tl.store(history + row * MAX_LEN + known + j, emitted, mask=j < count)
        tl.store(num_tokens + row, known + count)
        if tl.load(settings + row * SETTINGS_WORDS + FLAGS_WORD) & COUNTED:
            # One after the other: a token may be emitted twice.
            for place in range(count):
                at = counts + row * VOCAB + tl.load(packed + i * WIDTH + 2 + place)
                tl.store(at, tl.load(at) + 1)


_PREPARED = dict.fromkeys(_prepare.arg_names[:13], "*i32") | {"num_reqs": "i32"}
_COMMITTED = dict.fromkeys(_commit.arg_names[:6], "*i32")
_SIZES = {"MAX_LEN": 8192, "PADDING_ROW": 16}

COMPILED: tuple[KernelSpec, ...] = (
    KernelSpec(
        "prepare rows",
        _prepare,
        _PREPARED,
        {"QUERY_LEN": 7, "BLOCK_Q": 8, "TABLE_STRIDE": 512, "BLOCK_SIZE": 16, **_SIZES},
    ),
    KernelSpec(
        "commit rows", _commit, _COMMITTED, {"WIDTH": 9, "BLOCK_W": 16, "VOCAB": 49152, **_SIZES}
    ),
)
