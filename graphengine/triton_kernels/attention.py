"""Paged attention with the chain mask: fixed chunks of positions, joined in order.

Owns the kernels, their two schedules and the scratch that one needs. A chunk is a fixed set of
absolute positions; what a row gets of it (maximum, sum, weighted values) and the order in which a
row's chunks are joined depend on the row's own position and pages alone. Who computes a chunk does
not matter: one program walks all chunks of its rows, or many take some each and `_combine` joins
them. Both round alike, because they are made of the same functions.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from graphengine.attention.base import AttentionBatch, AttentionShape
from graphengine.triton_kernels.specs import KernelSpec

Tensor = torch.Tensor

BLOCK_M = 16  # pairs of a row and one of the heads that share a KV head
CHUNK = 256  # positions whose partial result is made alone
TARGET_PROGRAMS = 528  # four for each of 132 multiprocessors
# Bytes of one position's K, over the BLOCK_KV of them that are worked on at once.
BLOCK_BYTES = 16 << 10
NUM_WARPS = 4


def paged_attention(
    out: Tensor,
    qkv: Tensor,
    kv_cache: Tensor,
    batch: AttentionBatch,
    scratch: Tensor,
    *,
    shape: AttentionShape,
) -> None:
    """See `AttentionBackend.run`; q and the weights of V are rounded to the cache's dtype.

    A value of V that is not a finite number counts as zero: rows of one request share its loads,
    and one that may not see the value multiplies it by zero.

    Args:
        scratch: flat fp32 of any size; where the chunks' partials do not fit, each program walks
            all chunks of its rows, with the same bits.
    """
    for tensor in (out, qkv, kv_cache, batch.block_table, batch.positions, scratch):
        assert tensor.is_contiguous(), "kernels take contiguous tensors"
    num_reqs, max_blocks = batch.block_table.shape
    num_rows = batch.positions.shape[0]
    group = shape.num_heads // shape.num_kv_heads
    tiles = -(-batch.max_query_len * group // BLOCK_M)
    chunks = -(-max_blocks * shape.block_size // CHUNK)
    splits = _splits(num_reqs * tiles * shape.num_kv_heads, chunks)
    if num_rows * shape.num_heads * chunks * _partial_floats(shape.head_dim) > scratch.numel():
        splits = 1
    constants = _constants(shape, kv_cache.dtype)
    _attend[(num_reqs * tiles, shape.num_kv_heads, splits)](
        out,
        qkv,
        kv_cache,
        batch.block_table,
        batch.query_start_loc,
        batch.positions,
        scratch,
        tiles,
        max_blocks,
        chunks,
        **constants,
        SPLIT=splits > 1,
        **_OPTIONS,
    )
    if splits > 1:
        shared = {name: constants[name] for name in _COMBINED}
        _combine[(num_rows, shape.num_heads)](
            out, batch.positions, scratch, chunks, **shared, num_warps=1
        )


def _splits(programs: int, chunks: int) -> int:
    """Programs that share the chunks of one tile; 1: there is work enough for a GPU without."""
    return min(chunks, -(-TARGET_PROGRAMS // max(programs, 1)))


def _partial_floats(head_dim: int) -> int:
    """Of one (row, head, chunk): values, then maximum and sum, aligned to 16 bytes."""
    return -(-head_dim // 4) * 4 + 4


def _constants(shape: AttentionShape, dtype: torch.dtype) -> dict[str, int | float]:
    padded = max(16, triton.next_power_of_2(shape.head_dim))
    block = BLOCK_BYTES // (padded * dtype.itemsize)
    return {
        "NUM_HEADS": shape.num_heads,
        "KV_HEADS": shape.num_kv_heads,
        "HEAD_DIM": shape.head_dim,
        "PADDED_DIM": padded,
        "PARTIAL": _partial_floats(shape.head_dim),
        "BLOCK_SIZE": shape.block_size,
        "WINDOW": shape.sliding_window or 0,
        "SCALE": math.log2(math.e) / math.sqrt(shape.head_dim),
        "BLOCK_M": BLOCK_M,
        "BLOCK_KV": min(max(block, 16), 64),
        "CHUNK": CHUNK,
    }


_COMBINED = ("NUM_HEADS", "HEAD_DIM", "PADDED_DIM", "PARTIAL", "WINDOW", "CHUNK")
# Five stages: two blocks of K and V on their way, and the page ids of two more.
_OPTIONS = {"num_warps": NUM_WARPS, "num_stages": 5}


@triton.jit(do_not_specialize=["tiles", "max_blocks", "chunks"])
def _attend(
    out,
    qkv,
    cache,
    block_table,
    query_start_loc,
    positions,
    partials,
    tiles,
    max_blocks,
    chunks,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PARTIAL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One tile of a request's (row, head) pairs, over all of its chunks or every splits-th one.

    Row invariant: the rows of a tile never meet, and chunks lie at absolute positions.
    """
    request, kv_head = tl.program_id(0) // tiles, tl.program_id(1)
    group: tl.constexpr = NUM_HEADS // KV_HEADS
    pairs = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = (tl.load(query_start_loc + request) + pairs // group).to(tl.int64)
    live = rows < tl.load(query_start_loc + request + 1)
    at = tl.load(positions + rows, mask=live, other=-1)
    end = tl.max(at, 0) + 1  # the tile sees [begin, end); nothing where no pair is live
    begin = tl.maximum(tl.min(tl.where(live, at, end), 0) - WINDOW + 1, 0) if WINDOW else 0
    first = begin // CHUNK + tl.program_id(2)
    if first * CHUNK >= end:
        return
    dims = tl.arange(0, PADDED_DIM)
    known = live[:, None] & (dims < HEAD_DIM)[None, :]
    vectors = rows * NUM_HEADS + kv_head * group + pairs % group
    q_at = qkv + ((vectors + rows * 2 * KV_HEADS) * HEAD_DIM)[:, None] + dims[None, :]
    q = tl.load(q_at, mask=known, other=0.0).to(cache.dtype.element_ty)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total, values = tl.zeros_like(top), tl.zeros((BLOCK_M, PADDED_DIM), tl.float32)
    for chunk in range(first, tl.cdiv(end, CHUNK), tl.num_programs(2)):
        part_top, part_total, part = _chunk(
            q, cache + kv_head * HEAD_DIM, block_table + request.to(tl.int64) * max_blocks, at,
            tl.maximum(chunk * CHUNK, begin), tl.minimum(chunk * CHUNK + CHUNK, end),
            KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_SIZE, WINDOW, SCALE, BLOCK_KV,
        )  # fmt: skip
        if SPLIT:
            to_partial = partials + (vectors * chunks + chunk) * PARTIAL
            _store_partial(to_partial, part_top, part_total, part, live, HEAD_DIM, PARTIAL)
        else:
            top, total, values = _join(top, total, values, part_top, part_total, part)
    if not SPLIT:
        to_out = out + (vectors * HEAD_DIM)[:, None] + dims[None, :]
        tl.store(to_out, values / total[:, None], mask=known)


@triton.jit
def _store_partial(
    to_partial, top, total, values, live, HEAD_DIM: tl.constexpr, PARTIAL: tl.constexpr
):
    """What a chunk comes to, for `_combine`: values, then their scale and sum."""
    dims = tl.arange(0, values.shape[1])
    known = live[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(to_partial[:, None] + dims[None, :], values, mask=known)
    tl.store(to_partial + (PARTIAL - 4), top, mask=live)
    tl.store(to_partial + (PARTIAL - 3), total, mask=live)


@triton.jit
def _chunk(
    q,
    cache,
    pages,
    at,
    begin,
    end,
    SLOT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Softmax in progress of q [M, D], rows at `at`, over the positions [begin, end) of one chunk.

    Walked in blocks at absolute positions. A masked position weighs exactly 0, and a block of none
    but masked ones multiplies by 1 and adds 0: what a row's neighbours see leaves no trace.
    """
    top = tl.full((q.shape[0],), float("-inf"), tl.float32)
    total, values = tl.zeros_like(top), tl.zeros(q.shape, tl.float32)
    dims = tl.arange(0, q.shape[1])
    for start in range(begin // BLOCK_KV * BLOCK_KV, end, BLOCK_KV):
        column = start + tl.arange(0, BLOCK_KV)
        used = (column >= begin) & (column < end)  # by some row; the rest may be anything
        page = tl.load(pages + column // BLOCK_SIZE, mask=used, other=0).to(tl.int64)
        key_slot = page * (2 * BLOCK_SIZE) + column % BLOCK_SIZE
        key_at = cache + (key_slot * SLOT)[None, :] + dims[:, None]
        value_at = cache + ((key_slot + BLOCK_SIZE) * SLOT)[:, None] + dims[None, :]
        inside = dims < HEAD_DIM
        key = tl.load(key_at, mask=inside[:, None] & used[None, :], other=0.0)
        value = tl.load(value_at, mask=used[:, None] & inside[None, :], other=0.0)
        value = tl.where(tl.abs(value) < float("inf"), value, 0.0)
        seen = (column[None, :] <= at[:, None]) & used[None, :]
        if WINDOW > 0:
            seen &= column[None, :] > at[:, None] - WINDOW
        scores = tl.dot(q, key, input_precision="ieee") * SCALE
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        finite = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing seen: no inf - inf
        weights, keep = tl.exp2(scores - finite[:, None]), tl.exp2(top - finite)
        total = tl.fma(total, keep, tl.sum(weights, 1))
        values = values * keep[:, None]
        values = tl.dot(weights.to(value.dtype), value, values, input_precision="ieee")
        top = new_top
    return top, total, values


@triton.jit(do_not_specialize=["chunks"])
def _combine(
    out,
    positions,
    partials,
    chunks,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PARTIAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One head of one row: its chunks from the first that it sees to the last."""
    at = tl.load(positions + tl.program_id(0))
    pair = tl.program_id(0).to(tl.int64) * NUM_HEADS + tl.program_id(1) + tl.arange(0, 1)
    dims = tl.arange(0, PADDED_DIM)[None, :]
    first = tl.maximum(at - WINDOW + 1, 0) // CHUNK if WINDOW else 0
    top = tl.full((1,), float("-inf"), tl.float32)
    total, values = tl.zeros_like(top), tl.zeros((1, PADDED_DIM), tl.float32)
    for chunk in tl.range(first, at // CHUNK + 1, loop_unroll_factor=8):  # loads in flight
        partial = partials + (pair * chunks + chunk) * PARTIAL
        part = tl.load(partial[:, None] + dims, mask=dims < HEAD_DIM, other=0.0)
        part_top, part_total = tl.load(partial + (PARTIAL - 4)), tl.load(partial + (PARTIAL - 3))
        top, total, values = _join(top, total, values, part_top, part_total, part)
    to_out = out + (pair * HEAD_DIM)[:, None] + dims
    tl.store(to_out, values / total[:, None], mask=dims < HEAD_DIM)


@triton.jit
def _join(top, total, values, part_top, part_total, part):
    """Softmax in progress with the next chunk's; fma written out, so that no compiler chooses."""
    new_top = tl.maximum(top, part_top)
    finite = tl.where(new_top == float("-inf"), 0.0, new_top)
    keep, add = tl.exp2(top - finite), tl.exp2(part_top - finite)
    total = tl.fma(total, keep, part_total * add)
    values = tl.fma(values, keep[:, None], part * add[:, None])
    return new_top, total, values


def _specs(name: str, shape: AttentionShape, dtype: torch.dtype) -> list[KernelSpec]:
    element = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}[dtype]
    constants = _constants(shape, dtype)
    shared = {name: constants[name] for name in _COMBINED}
    integers = ("block_table", "query_start_loc", "positions")
    signature = {"out": "*fp32", "qkv": "*fp32", "cache": element, "partials": "*fp32"}
    signature |= dict.fromkeys(integers, "*i32")
    signature |= dict.fromkeys(("tiles", "max_blocks", "chunks"), "i32")
    combined = {key: signature[key] for key in ("out", "positions", "partials", "chunks")}
    attend = [
        KernelSpec(
            f"attend {name} {element[1:]} {'split' if split else 'walk'}",
            _attend,
            signature,
            constants | {"SPLIT": split},
            _OPTIONS,
        )
        for split in (True, False)
    ]
    combine = KernelSpec(f"combine {name}", _combine, combined, shared, {"num_warps": 1})
    return [*attend, combine] if dtype == torch.bfloat16 else attend  # it sees no cache


def _shape(heads: int, kv_heads: int, dim: int, window: int | None = None) -> AttentionShape:
    return AttentionShape(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        block_size=16,
        sliding_window=window,
    )


COMPILED: tuple[KernelSpec, ...] = (
    *_specs("9/3x64", _shape(9, 3, 64), torch.bfloat16),
    *_specs("9/3x64", _shape(9, 3, 64), torch.float32),
    *_specs("32/8x128", _shape(32, 8, 128), torch.bfloat16),
    *_specs("32/8x80 window", _shape(32, 8, 80, 4096), torch.bfloat16),
    *_specs("8/4x256", _shape(8, 4, 256), torch.bfloat16),
)
