"""Row-wise kernels: embedding, RMS norm, argmax, and what a chain of drafts moves between rows.

A program has one row, or a part of one, and reads no other; sums of a row are in one fixed order,
that of a block's own reduction. So a row's bits depend on the row alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.triton_kernels.chunks import check_contiguous
from graphengine.triton_kernels.specs import KernelSpec

Tensor = torch.Tensor

COLUMNS = 1024  # of a row that one program moves
NORM_COLUMNS = 4096  # of a row that are in flight at once
CHUNK = 4096  # of a vocabulary that one program searches
ALIGNMENT = 16  # bytes


def embed(out: Tensor, table: Tensor, token_ids: Tensor) -> None:
    """out [T, hidden] fp32 = table[token_ids]."""
    take_rows(out, table, token_ids)


def take_rows(out: Tensor, x: Tensor, rows: Tensor) -> None:
    """out [R, hidden] fp32 = x[rows]."""
    check_contiguous(out, x, rows)
    assert out.shape[1] == x.shape[1], "a row is as wide as the one it is made of"
    _gather[_grid(out)](out, x, rows, WIDTH=out.shape[1], COLUMNS=COLUMNS)


def load_slots(out: Tensor, storage: Tensor, slots: Tensor) -> None:
    """out [T, width] fp32 = storage [slots, width][slots]."""
    take_rows(out, storage, slots)


def store_slots(
    storage: Tensor, x: Tensor, slots: Tensor, column: int, num_null_slots: int
) -> None:
    """storage[slots, column:] = x [T, hidden], but for slots below `num_null_slots`."""
    check_contiguous(storage, x, slots)
    assert column + x.shape[1] <= storage.shape[1], "rows of x fit into those of storage"
    _scatter[_grid(x)](
        storage,
        x,
        slots,
        WIDTH=x.shape[1],
        STRIDE=storage.shape[1],
        COLUMN=column,
        NUM_NULL=num_null_slots,
        COLUMNS=COLUMNS,
    )


def zero_first(out: Tensor, positions: Tensor) -> None:
    """out [T, hidden] = 0 where positions are 0."""
    check_contiguous(out, positions)
    _zero[_grid(out)](out, positions, WIDTH=out.shape[1], COLUMNS=COLUMNS)


def concat_rows(out: Tensor, first: Tensor, second: Tensor) -> None:
    """out [T, a + b] = first [T, a], second [T, b] side by side."""
    check_contiguous(out, first, second)
    assert out.shape[1] == first.shape[1] + second.shape[1], "out is as wide as both"
    widths = {"A": first.shape[1], "B": second.shape[1]}
    _concat[_grid(out)](out, first, second, **widths, COLUMNS=COLUMNS)


def shift_tokens(out: Tensor, token_ids: Tensor, last_rows: Tensor, new: Tensor) -> None:
    """Each request's tokens moved up by one, `new` in its last live row; out may be token_ids."""
    check_contiguous(out, token_ids, last_rows, new)
    width = len(token_ids) // len(last_rows)
    _shift[(len(last_rows),)](
        out, token_ids, last_rows, new, WIDTH=width, BLOCK=triton.next_power_of_2(width)
    )


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, *, eps: float) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight, by row; x may be out."""
    check_summed(out, x, weight)
    width = x.shape[1]
    block = min(NORM_COLUMNS, triton.next_power_of_2(width))
    _rms_norm[(len(x),)](out, x, weight, WIDTH=width, BLOCK=block, EPS=eps, **_norm_options(width))


def argmax(out: Tensor, logits: Tensor, values: Tensor, indices: Tensor) -> None:
    """out [T] = index of each row's largest number, the lowest on ties; 0 where there is only NaN.

    Args:
        values, indices: fp32 and int32 scratch, at least T * ceil(vocab / CHUNK) each.
    """
    check_contiguous(out, logits, values, indices)
    num_rows, width = logits.shape
    chunks = triton.cdiv(width, CHUNK)
    assert num_rows * chunks <= len(values), f"argmax of {num_rows} rows has no scratch"
    _best_of_chunk[(num_rows, chunks)](values, indices, logits, WIDTH=width, BLOCK=CHUNK)
    _best_of_row[(num_rows,)](
        out,
        values,
        indices,
        CHUNKS=chunks,
        BLOCK=triton.next_power_of_2(chunks),
        NONE=width,
        num_warps=1,
    )


def argmax_floats(max_rows: int, vocab: int) -> int:
    """Scratch of `argmax`, its halves being `values` and `indices`."""
    return 2 * max_rows * -(-vocab // CHUNK)


def check_summed(*tensors: Tensor) -> None:
    """The layout of what a kernel adds up.

    For other addresses Triton compiles another kernel, which may add in another order.
    """
    check_contiguous(*tensors)
    for tensor in tensors:
        assert tensor.data_ptr() % ALIGNMENT == 0, "kernels that add take aligned tensors"


def _norm_options(width: int) -> dict[str, int]:
    return {"num_warps": 4 if width <= 1024 else 8}


def _grid(rows: Tensor) -> tuple[int, int]:
    return len(rows), triton.cdiv(rows.shape[1], COLUMNS)


@triton.jit
def _columns(WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    return columns, columns < WIDTH


@triton.jit
def _gather(out, x, rows, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    columns, mask = _columns(WIDTH, COLUMNS)
    row = tl.load(rows + t).to(tl.int64)
    tl.store(
        out + t * WIDTH + columns,
        tl.load(x + row * WIDTH + columns, mask=mask).to(tl.float32),
        mask=mask,
    )


@triton.jit
def _scatter(
    storage,
    x,
    slots,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    COLUMN: tl.constexpr,
    NUM_NULL: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    columns, mask = _columns(WIDTH, COLUMNS)
    slot = tl.load(slots + t).to(tl.int64)
    values = tl.load(x + t * WIDTH + columns, mask=mask, other=0.0)
    at = storage + slot * STRIDE + COLUMN + columns
    tl.store(at, values.to(storage.dtype.element_ty), mask=mask & (slot >= NUM_NULL))


@triton.jit
def _zero(out, positions, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    columns, mask = _columns(WIDTH, COLUMNS)
    is_first = tl.load(positions + t) == 0
    zeros = tl.zeros([COLUMNS], dtype=tl.float32)
    tl.store(out + t * WIDTH + columns, zeros, mask=mask & is_first)


@triton.jit
def _concat(out, first, second, A: tl.constexpr, B: tl.constexpr, COLUMNS: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    columns, mask = _columns(A + B, COLUMNS)
    is_first = columns < A
    left = tl.load(first + t * A + columns, mask=is_first, other=0.0)
    right = tl.load(second + t * B + columns - A, mask=mask & ~is_first, other=0.0)
    tl.store(out + t * (A + B) + columns, tl.where(is_first, left, right), mask=mask)


@triton.jit
def _shift(out, token_ids, last_rows, new, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    at = r * WIDTH + columns
    last = tl.load(last_rows + r) - r * WIDTH  # of the request's own rows
    moved = tl.load(token_ids + at + 1, mask=columns < last, other=0)
    tokens = tl.where(columns == last, tl.load(new + r), moved)
    tl.debug_barrier()  # out may be token_ids: everything has been read
    tl.store(out + at, tokens, mask=columns < WIDTH)


@triton.jit
def inverse_rms(sum_of_squares, WIDTH: tl.constexpr, EPS: tl.constexpr):
    """1 / sqrt(mean + eps), each step correctly rounded as on CPU; `/` and sqrt are not."""
    mean = tl.div_rn(sum_of_squares, tl.full((), WIDTH, tl.float32))
    return tl.div_rn(tl.full((), 1.0, tl.float32), tl.sqrt_rn(mean + EPS))


@triton.jit
def _rms_norm(out, x, weight, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * WIDTH
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for first in tl.static_range(0, WIDTH, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        part = tl.load(x + row + columns, mask=columns < WIDTH, other=0.0)
        squares = tl.fma(part, part, squares)  # written out, so that no compiler chooses
    scale = inverse_rms(tl.sum(squares), WIDTH, EPS)
    for first in tl.static_range(0, WIDTH, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        mask = columns < WIDTH
        part = tl.load(x + row + columns, mask=mask, other=0.0)
        scaled = part * scale * tl.load(weight + columns, mask=mask, other=0.0)
        tl.store(out + row + columns, scaled, mask=mask)


@triton.jit
def _best_of_chunk(values, indices, logits, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The largest number of a part of a row and its first index; WIDTH where there is only NaN."""
    t, chunk = tl.program_id(0), tl.program_id(1)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    numbers = tl.load(logits + t.to(tl.int64) * WIDTH + columns, mask=mask, other=float("-inf"))
    is_number = mask & (numbers == numbers)
    largest = tl.max(tl.where(is_number, numbers, float("-inf")))
    found = tl.min(tl.where(is_number & (numbers == largest), columns, WIDTH))
    at = t * tl.num_programs(1) + chunk
    tl.store(values + at, largest)
    tl.store(indices + at, found)


@triton.jit
def _best_of_row(
    out, values, indices, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, NONE: tl.constexpr
):
    t = tl.program_id(0)
    chunks = tl.arange(0, BLOCK)
    mask = chunks < CHUNKS
    numbers = tl.load(values + t * CHUNKS + chunks, mask=mask, other=float("-inf"))
    found = tl.load(indices + t * CHUNKS + chunks, mask=mask, other=NONE)
    first = tl.min(tl.where(numbers == tl.max(numbers), found, NONE))
    tl.store(out + t, tl.where(first == NONE, 0, first))


def _moves(width: int, element: str) -> list[KernelSpec]:
    sizes: dict[str, object] = {"WIDTH": width, "COLUMNS": COLUMNS}
    states = sizes | {"STRIDE": 3 * width, "COLUMN": width, "NUM_NULL": 16}
    rows = {"out": "*fp32", "x": element, "rows": "*i32"}
    stored = {"storage": element, "x": "*fp32", "slots": "*i32"}
    return [
        KernelSpec(f"gather {element} {width}", _gather, rows, sizes),
        KernelSpec(f"store slots {element} {width}", _scatter, stored, states),
    ]


def _norm(width: int) -> KernelSpec:
    block = min(NORM_COLUMNS, triton.next_power_of_2(width))
    constants = {"WIDTH": width, "BLOCK": block, "EPS": 1e-5}
    signature = dict.fromkeys(("out", "x", "weight"), "*fp32")
    return KernelSpec(f"rms norm {width}", _rms_norm, signature, constants, _norm_options(width))


def _argmax(vocab: int) -> list[KernelSpec]:
    chunks = triton.cdiv(vocab, CHUNK)
    pair = {"values": "*fp32", "indices": "*i32"}
    padded = triton.next_power_of_2(chunks)
    ends: dict[str, object] = {"CHUNKS": chunks, "BLOCK": padded, "NONE": vocab}
    return [
        KernelSpec(
            f"argmax of chunks {vocab}",
            _best_of_chunk,
            pair | {"logits": "*fp32"},
            {"WIDTH": vocab, "BLOCK": CHUNK},
        ),
        KernelSpec(
            f"argmax of rows {vocab}",
            _best_of_row,
            pair | {"out": "*i32"},
            ends,
            {"num_warps": 1},
        ),
    ]


COMPILED: tuple[KernelSpec, ...] = (
    *_moves(576, "*bf16"),
    *_moves(4096, "*fp32"),
    _norm(576),
    _norm(8192),
    *_argmax(49152),
    *_argmax(128256),
    KernelSpec(
        "zero first",
        _zero,
        {"out": "*fp32", "positions": "*i32"},
        {"WIDTH": 576, "COLUMNS": COLUMNS},
    ),
    KernelSpec(
        "concat",
        _concat,
        dict.fromkeys(("out", "first", "second"), "*fp32"),
        {"A": 576, "B": 576, "COLUMNS": COLUMNS},
    ),
    KernelSpec(
        "shift tokens",
        _shift,
        dict.fromkeys(("out", "token_ids", "last_rows", "new"), "*i32"),
        {"WIDTH": 7, "BLOCK": 8},
    ),
)
