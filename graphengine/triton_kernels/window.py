"""A chain's first kernel on a GPU: the rule of `kernels/window.cpp`, a program a request.

Integers alone, and a request's numbers depend on its own row and place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from graphengine.device_rows import DeviceRows
from graphengine.triton_kernels.specs import KernelSpec
from proposers.requests import REQUEST

Tensor = torch.Tensor

REQUEST_WORDS = tl.constexpr(REQUEST.itemsize // 4)
POSITION_WORD = tl.constexpr(REQUEST.fields["num_tokens"][1] // 4)  # type: ignore[index]
SHIFT = tl.constexpr(1)  # words of the rules
NUM_EMBEDDINGS = tl.constexpr(2)
LOOP_ROWS = tl.constexpr(3)


def prepare_window(
    buffers: Sequence[Tensor], rules: Tensor, rows: DeviceRows, *, width: int, block: int
) -> None:
    """Write the rows of a chain.

    Args:
        buffers: of `WINDOW_WRITTEN` and `WINDOW_READ` (`proposers.device`), in that order.
        rules: see `DraftOps.prepare_window`; the first of them is `width`.
        block: slots of a KV block.
    """
    loop_slots, table = buffers[5], buffers[-1]
    num_reqs, max_blocks = table.shape
    query_len = len(loop_slots) // num_reqs
    _prepare[(num_reqs,)](
        *buffers,
        rows.num_tokens,
        rows.token_ids,
        rules,
        num_reqs,
        WIDTH=width,
        BLOCK_W=triton.next_power_of_2(width),
        QUERY_LEN=query_len,
        BLOCK_Q=triton.next_power_of_2(query_len),
        MAX_LEN=rows.max_model_len,
        TABLE_STRIDE=max_blocks,
        BLOCK_SIZE=block,
        PADDING_ROW=rows.padding_row,
    )


@triton.jit(do_not_specialize=["num_reqs"])
def _prepare(
    token_ids,
    positions,
    slot_mapping,
    last_rows,
    loop_positions,
    loop_slots,
    requests,
    state_rows,
    allowed_drafts,
    filled,
    block_table,
    num_tokens,
    history,
    rules,
    num_reqs,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    MAX_LEN: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDING_ROW: tl.constexpr,
):
    i = tl.program_id(0)
    row = tl.load(state_rows + i)
    drafts = tl.where(row == PADDING_ROW, 0, tl.load(allowed_drafts + i))
    drafting = drafts > 0
    shift = tl.load(rules + SHIFT)
    known = tl.where(drafting, tl.load(num_tokens + row), 0)
    end = tl.where(drafting, known - shift, 0)
    start = tl.maximum(tl.maximum(end - WIDTH, 0), tl.load(filled + i))
    start = tl.where(drafting, tl.minimum(start, end - 1), 0)

    j = tl.arange(0, BLOCK_W)
    slot = start + j
    live = (j < WIDTH) & (slot < end)
    token = tl.load(history + row.to(tl.int64) * MAX_LEN + slot + shift, mask=live, other=0)
    token = tl.minimum(token, tl.load(rules + NUM_EMBEDDINGS) - 1)
    block = tl.load(block_table + i * TABLE_STRIDE + slot // BLOCK_SIZE, mask=live, other=0)
    t = i * WIDTH + j
    tl.store(token_ids + t, tl.where(live, token, 0), mask=j < WIDTH)
    tl.store(positions + t, tl.where(live, slot, 0), mask=j < WIDTH)
    place = tl.where(live, block * BLOCK_SIZE + slot % BLOCK_SIZE, 0)
    tl.store(slot_mapping + t, place, mask=j < WIDTH)
    tl.store(last_rows + i, i * WIDTH + tl.maximum(end - start, 1) - 1)
    tl.store(requests + i * REQUEST_WORDS + POSITION_WORD, known)

    step = tl.arange(0, BLOCK_Q)
    mask = step < QUERY_LEN
    runs_on = mask & drafting & (step < tl.load(rules + LOOP_ROWS + drafts))
    position = tl.where(drafting, tl.minimum(end + step, MAX_LEN - 1), 0)
    block = tl.load(block_table + i * TABLE_STRIDE + position // BLOCK_SIZE, mask=runs_on, other=0)
    t = step * num_reqs + i
    tl.store(loop_positions + t, position, mask=mask)
    place = tl.where(runs_on, block * BLOCK_SIZE + position % BLOCK_SIZE, 0)
    tl.store(loop_slots + t, place, mask=mask)


COMPILED: tuple[KernelSpec, ...] = (
    KernelSpec(
        "prepare window",
        _prepare,
        dict.fromkeys(_prepare.arg_names[:14], "*i32") | {"num_reqs": "i32"},
        {
            "WIDTH": 7,
            "BLOCK_W": 8,
            "QUERY_LEN": 7,
            "BLOCK_Q": 8,
            "MAX_LEN": 8192,
            "TABLE_STRIDE": 512,
            "BLOCK_SIZE": 16,
            "PADDING_ROW": 16,
        },
    ),
)
