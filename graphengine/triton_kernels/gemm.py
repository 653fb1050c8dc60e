"""Row-invariant matrix products: fixed tiles, a fixed split of K, partial sums added in order.

Owns the tiles and the launchers. A row's bits depend on that row and the weight alone: the tile is
a function of (n, k), every product is BLOCK_M rows high whatever the number of rows, rows of a tile
never meet, and the partials of a split are added first to last. Scratch comes from the caller;
knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from graphengine.triton_kernels.specs import KernelSpec

Tensor = torch.Tensor

BLOCK_M = 16  # rows of a tile, at every number of rows
BLOCK_N = 64
REDUCE_COLUMNS = 512  # of a program that adds partials
MIN_SPLIT_K = 128  # less of K, and writing the partial costs more than reading the weights
TARGET_PROGRAMS = 264  # two for each of 132 multiprocessors
NUM_WARPS = 4

# With so many floats of scratch any product runs, a tile of rows at a time. A split one has c
# columns of programs and at most round(TARGET_PROGRAMS / c) > 1 splits: c is two thirds at most.
LEAST_SCRATCH = BLOCK_M * BLOCK_N * (TARGET_PROGRAMS + TARGET_PROGRAMS // 3)


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product with a weight [n, k] is cut."""

    block_n: int
    block_k: int
    split_k: int  # 1: no partials

    def steps(self, k: int) -> int:
        """Blocks of K that one split walks."""
        return _ceil_div(_ceil_div(k, self.block_k), self.split_k)


def tile_for(n: int, k: int) -> Tile:
    """The tile of a weight [n, k]: enough programs for a large GPU even where there is one tile of
    rows. A function of n and k alone, which row invariance rests on.
    """
    block_n = BLOCK_N if n >= 2048 else BLOCK_N // 2
    block_k = 128 if k % 128 == 0 else 64
    blocks = _ceil_div(k, block_k)
    wanted = max(1, round(TARGET_PROGRAMS / _ceil_div(n, block_n)))
    most = max(1, blocks * block_k // MIN_SPLIT_K)
    steps = _ceil_div(blocks, min(wanted, most))
    return Tile(block_n, block_k, _ceil_div(blocks, steps))


def scratch_floats(max_rows: int, shapes: Iterable[tuple[int, int]]) -> int:
    """Floats of scratch with which calls of up to max_rows rows launch their kernels once.

    More rows than that are served range by range, with the same bits.

    Args:
        shapes: (n, k) of every weight; (2 i, k) for gate_up.
    """
    split = [tile_for(n, k).split_k * n for n, k in shapes if tile_for(n, k).split_k > 1]
    return max(max_rows, BLOCK_M) * max(split, default=0)


def linear(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, scratch: Tensor, *, add: bool
) -> None:
    """out [T, n] fp32 = x [T, k] fp32 @ weight [n, k]^T (+ bias [n] fp32); with `add` the result is
    added into out. x is rounded to the weight's dtype, sums are fp32.

    Args:
        scratch: flat fp32, see `scratch_floats`.

    Raises:
        ValueError: scratch does not hold the partials of one tile of rows.
    """
    _product(out, x, weight, bias, scratch, add=add, gated=False)


def gate_up(out: Tensor, x: Tensor, weight: Tensor, scratch: Tensor) -> None:
    """out [T, i] fp32 = silu(x @ gate^T) * (x @ up^T); weight [2 i, k]: gate's rows, then up's.

    Raises:
        ValueError: scratch does not hold the partials of one tile of rows.
    """
    _product(out, x, weight, None, scratch, add=False, gated=True)


def _product(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scratch: Tensor,
    *,
    add: bool,
    gated: bool,
) -> None:
    rows, (n, k) = x.shape[0], weight.shape
    for tensor in (out, x, weight, scratch):
        assert tensor.is_contiguous(), "kernels take contiguous tensors"
    assert x.shape[1] == k, "x is as wide as the weight"
    assert out.shape == (rows, n // 2 if gated else n), "out is as wide as the weight is high"
    tile = tile_for(n, k)
    at_once = rows if tile.split_k == 1 else _rows_at_once(tile, n, scratch)
    epilogue = {"N": n, "HAS_BIAS": bias is not None, "ADD": add, "GATED": gated}
    for first in range(0, rows, max(at_once, 1)):
        count = min(at_once, rows - first)
        grid = (_ceil_div(count, BLOCK_M), _ceil_div(n, tile.block_n), tile.split_k)
        _multiply[grid](
            out,
            x,
            weight,
            bias,
            scratch,
            first,
            count,
            **epilogue,
            **_constants(tile, k),
            **_options(weight.dtype),
        )
        if tile.split_k > 1:
            _add_partials[(count, _ceil_div(n, REDUCE_COLUMNS))](
                out,
                bias,
                scratch,
                first,
                count,
                **epilogue,
                SPLIT_K=tile.split_k,
                COLUMNS=REDUCE_COLUMNS,
                num_warps=NUM_WARPS,
            )


def _rows_at_once(tile: Tile, n: int, scratch: Tensor) -> int:
    fit = scratch.numel() // (tile.split_k * n) // BLOCK_M * BLOCK_M
    if fit == 0:
        raise ValueError(
            f"scratch of {scratch.numel()} floats: a product of {n} columns split {tile.split_k} "
            f"times needs at least {BLOCK_M * tile.split_k * n}"
        )
    return fit


def _constants(tile: Tile, k: int) -> dict[str, int]:
    return {
        "K": k,
        "STEPS": tile.steps(k),
        "SPLIT_K": tile.split_k,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
    }


def _options(dtype: torch.dtype) -> dict[str, int]:
    # Bytes in flight hide the latency of memory; blocks of fp32 are twice as large.
    return {"num_warps": NUM_WARPS, "num_stages": 4 if dtype.itemsize == 2 else 3}


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def _multiply(
    out,
    x,
    weight,
    bias,
    partials,
    first_row,
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    STEPS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
):
    """One tile of one split: BLOCK_M rows by BLOCK_N columns over STEPS blocks of K.

    Tiles of rows are the fastest dimension of the grid, so that programs that read the same weights
    run together. Row invariant: each row is a sum over K of its own, in one order.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    inner = tl.arange(0, BLOCK_K)
    live, inside = rows < num_rows, columns < N
    # Gate and up take turns, so that one program has both numbers of a pair.
    weight_rows = (columns % 2) * (N // 2) + columns // 2 if GATED else columns
    x_at = x + (first_row + rows).to(tl.int64)[:, None] * K + inner[None, :]
    weight_at = weight + weight_rows.to(tl.int64)[None, :] * K + inner[:, None]
    even: tl.constexpr = K == STEPS * SPLIT_K * BLOCK_K
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(STEPS):
        start = (split * STEPS + step) * BLOCK_K
        if even:
            some = tl.load(x_at + start, mask=live[:, None], other=0.0)
            block = tl.load(weight_at + start, mask=inside[None, :], other=0.0)
        else:
            known = inner < K - start
            some = tl.load(x_at + start, mask=live[:, None] & known[None, :], other=0.0)
            block = tl.load(weight_at + start, mask=inside[None, :] & known[:, None], other=0.0)
        some = some.to(weight.dtype.element_ty)
        sums = tl.dot(some, block, sums, input_precision="ieee")
    if SPLIT_K == 1:
        first_column = tl.program_id(1) * BLOCK_N
        _write(out, bias, sums, first_row + rows, live, first_column, N, HAS_BIAS, ADD, GATED)
    else:
        at = (split * num_rows + rows).to(tl.int64)[:, None] * N + columns[None, :]
        tl.store(partials + at, sums, mask=live[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def _add_partials(
    out,
    bias,
    partials,
    first_row,
    num_rows,
    N: tl.constexpr,
    SPLIT_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
):
    """COLUMNS numbers of one row: its partials from the first split to the last."""
    row = tl.program_id(0) + tl.arange(0, 1)
    first_column = tl.program_id(1) * COLUMNS
    columns = first_column + tl.arange(0, COLUMNS)
    inside = (columns < N)[None, :]
    at = partials + row.to(tl.int64)[:, None] * N + columns[None, :]
    sums = tl.load(at, mask=inside, other=0.0)
    for _ in tl.static_range(1, SPLIT_K):
        at += num_rows.to(tl.int64) * N
        sums += tl.load(at, mask=inside, other=0.0)
    live = row >= 0
    _write(out, bias, sums, first_row + row, live, first_column, N, HAS_BIAS, ADD, GATED)


@triton.jit
def _write(
    out,
    bias,
    sums,
    rows,
    live,
    first_column,
    N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
):
    """Finish the sums of complete rows [R, C] from a column on: bias, activation, addition."""
    columns = first_column + tl.arange(0, sums.shape[1])
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=columns < N, other=0.0)[None, :]
    width: tl.constexpr = N // 2 if GATED else N
    if GATED:
        half: tl.constexpr = sums.shape[1] // 2
        gate, up = tl.split(tl.reshape(sums, (sums.shape[0], half, 2)))
        finished = gate / (1.0 + tl.exp(-gate)) * up
        columns = first_column // 2 + tl.arange(0, half)
    else:
        finished = sums
    mask = live[:, None] & (columns < width)[None, :]
    at = out + rows.to(tl.int64)[:, None] * width + columns[None, :]
    if ADD:
        finished += tl.load(at, mask=mask, other=0.0)
    tl.store(at, finished, mask=mask)


def _specs(
    name: str, n: int, k: int, dtype: torch.dtype, *, bias: bool = False, gated: bool = False
) -> list[KernelSpec]:
    tile = tile_for(n, k)
    element = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}[dtype]
    flags: dict[str, object] = {"N": n, "HAS_BIAS": bias, "ADD": not gated, "GATED": gated}
    flags |= {} if bias else {"bias": None}
    signature = {"out": "*fp32", "partials": "*fp32", "first_row": "i32", "num_rows": "i32"}
    signature |= {"bias": "*fp32"} if bias else {}
    multiply = KernelSpec(
        f"gemm {name} {element[1:]} split {tile.split_k}",
        _multiply,
        signature | {"x": "*fp32", "weight": element},
        flags | _constants(tile, k),
        _options(dtype),
    )
    if tile.split_k == 1:
        return [multiply]
    constants = flags | {"SPLIT_K": tile.split_k, "COLUMNS": REDUCE_COLUMNS}
    add = KernelSpec(f"partials {name}", _add_partials, signature, constants)
    return [multiply, add]


COMPILED: tuple[KernelSpec, ...] = (
    *_specs("576x576", 576, 576, torch.bfloat16),
    *_specs("3072x576 gated", 3072, 576, torch.bfloat16, gated=True),
    *_specs("6144x4096 bias", 6144, 4096, torch.bfloat16, bias=True),
    *_specs("28672x4096 gated", 28672, 4096, torch.bfloat16, gated=True),
    *_specs("128256x4096", 128256, 4096, torch.float32),
)
