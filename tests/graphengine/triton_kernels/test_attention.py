"""TritonAttention, interpreted: values, and bits that depend on nothing but what a row sees.

Values are held to the reference backend. Every unowned slot is NaN, and so is the output before a
call, so that a place that was read or left out by mistake cannot pass.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from graphengine.attention.base import AttentionBatch, AttentionShape, plan
from graphengine.attention.reference import ReferenceAttention
from graphengine.attention.triton import TritonAttention
from graphengine.triton_kernels import attention
from tests.graphengine.kernels.calls import Context

# Pairs of a tile that no row has are divided by nothing, and not written.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in divide")
CHUNK = 128
NAN = float("nan")
WALK, SPLIT = 0, 1 << 21  # floats of scratch: in these tests none hold the partials, or all


@pytest.fixture(autouse=True)
def _smaller_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes milliseconds a block; half the chunk is still of two blocks."""
    monkeypatch.setattr(attention, "CHUNK", CHUNK)


def make_context(
    requests: list[tuple[int, int]],
    heads: tuple[int, int, int] = (3, 1, 16),
    *,
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    window: int = 0,
    poison: float = NAN,
) -> Context:
    """Requests of (context length, last rows of it that are queries) for heads (q, kv, dim)."""
    num_heads, kv_heads, dim = heads
    generator = torch.Generator().manual_seed(7)
    blocks = [-(-length // block_size) for length, _ in requests]
    order = torch.randperm(sum(blocks) + 2, generator=generator) + 1
    cache = torch.full((sum(blocks) + 3, 2, block_size, kv_heads, dim), poison).to(dtype)
    table = torch.zeros(len(requests), max(blocks) + 2, dtype=torch.int32)
    positions = []
    for r, (length, rows) in enumerate(requests):
        mine = order[sum(blocks[:r]) : sum(blocks[: r + 1])]
        table[r, : blocks[r]] = mine.int()
        at = torch.arange(length)
        values = torch.randn(length, 2, kv_heads, dim, generator=generator)
        cache[mine[at // block_size], :, at % block_size] = values.to(dtype)
        positions.append(at[length - rows :].int())
    starts = torch.tensor([0, *(rows for _, rows in requests)]).cumsum(0).int()
    return Context(
        qkv=torch.randn(int(starts[-1]), (num_heads + 2 * kv_heads) * dim, generator=generator),
        cache=cache,
        block_table=table,
        query_start_loc=starts,
        positions=torch.cat(positions),
        num_heads=num_heads,
        window=window,
    )


def attend(
    context: Context, scratch_floats: int = SPLIT, *, reference: bool = False, spare_rows: int = 0
) -> Tensor:
    """Through the backend's whole interface; `spare_rows` more than the longest request has."""
    num_heads, kv_heads, head_dim, block_size = context.shape
    shape = AttentionShape(
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        sliding_window=context.window or None,
    )
    batch = AttentionBatch(
        context.block_table,
        context.query_start_loc,
        context.positions,
        int(context.query_start_loc.diff().max()) + spare_rows,
    )
    scratch = torch.full((scratch_floats,), NAN)
    backend = (
        ReferenceAttention(shape)
        if reference
        else TritonAttention(shape, torch.device("cpu"), scratch)
    )
    plan(backend, batch)
    out = torch.full((len(context.positions), num_heads * head_dim), NAN)
    backend.run(out, context.qkv, context.cache, batch)
    return out


def rows_of(context: Context, request: int, first: int, last: int) -> Context:
    """Rows [first, last) of one request as a batch of their own."""
    start = int(context.query_start_loc[request])
    return replace(
        context,
        qkv=context.qkv[start + first : start + last].clone(),
        block_table=context.block_table[request : request + 1].clone(),
        query_start_loc=torch.tensor([0, last - first], dtype=torch.int32),
        positions=context.positions[start + first : start + last].clone(),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("heads", "block_size", "window"),
    [
        ((9, 3, 64), 16, 0),
        ((4, 2, 96), 5, 140),
        ((2, 2, 80), 1, 5),
        ((20, 1, 16), 256, 0),
        ((20, 1, 16), 256, 40),
        ((1, 1, 256), 32, 0),
    ],
)
def test_values(
    dtype: torch.dtype, heads: tuple[int, int, int], block_size: int, window: int
) -> None:
    """Head grouping, page look-up, chain mask, window, and the joining of chunks."""
    requests = [(CHUNK + 44, 3), (64, 1), (2 * CHUNK + 1, 2)]
    context = make_context(requests, heads, dtype=dtype, block_size=block_size, window=window)
    expected = attend(context, reference=True)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    for scratch in (WALK, SPLIT):
        out = attend(context, scratch)
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("window", [0, 40])
def test_bits_do_not_depend_on_batch_or_schedule(dtype: torch.dtype, window: int) -> None:
    """q = 1 against q = k + 1, batch mates, and who computes a chunk: not one bit of a row."""
    requests = [(CHUNK + 3, 7), (64, 1), (2 * CHUNK + 20, 2), (9, 5)]
    context = make_context(requests, dtype=dtype, window=window)
    out = attend(context)
    assert out.isfinite().all()
    assert torch.equal(attend(context, WALK), out)
    assert torch.equal(attend(context, spare_rows=9), out)
    for request, (_, rows) in enumerate(requests):
        for row in {0, rows // 2, rows - 1}:
            at = int(context.query_start_loc[request]) + row
            alone = rows_of(context, request, row, row + 1)
            for scratch in (WALK, SPLIT):
                assert torch.equal(attend(alone, scratch)[0], out[at])


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_prefill_boundaries_do_not_change_bits(rows: int) -> None:
    """A prompt computed in chunks of any size, or decoded row by row, gives the same rows."""
    length = CHUNK + 30
    whole = make_context([(length, length)], (2, 1, 16))
    out = attend(whole)
    torch.testing.assert_close(out, attend(whole, reference=True), rtol=1e-5, atol=1e-5)
    starts = range(0, length, rows) if rows > 1 else (0, 15, 16, CHUNK - 1, CHUNK, length - 1)
    for first in starts:
        last = min(length, first + rows)
        assert torch.equal(attend(rows_of(whole, 0, first, last)), out[first:last])


def test_order_of_pages_has_no_effect() -> None:
    """Where a page lies in memory must not matter, and which page it is must."""
    context = make_context([(CHUNK + 40, 3), (50, 2)])
    out = attend(context)
    order = torch.cat([torch.tensor([0]), torch.randperm(len(context.cache) - 1) + 1])
    moved = torch.empty_like(context.cache)
    moved[order] = context.cache
    table = order[context.block_table.long()].int()
    assert torch.equal(attend(replace(context, cache=moved, block_table=table)), out)
    wrong = context.block_table.clone()
    wrong[0, [2, 3]] = wrong[0, [3, 4]]
    changed = attend(replace(context, block_table=wrong))
    assert not torch.isclose(changed[:3], out[:3]).all(1).any()
    assert torch.equal(changed[3:], out[3:])


@pytest.mark.parametrize("scratch", [WALK, SPLIT])
def test_unowned_slots_have_no_effect(scratch: int) -> None:
    """NaN, infinity or numbers in slots that a row may not see must not reach it."""
    requests = [(130, 3), (18, 3), (CHUNK + 20, 20)]
    clean = attend(make_context(requests, poison=0.0), scratch)
    for poison in (NAN, float("inf"), -float("inf"), 1e30):
        assert torch.equal(attend(make_context(requests, poison=poison), scratch), clean)


def test_what_only_later_rows_see_has_no_effect() -> None:
    """Rows without a token see slots that nobody wrote: NaN there must stay in those rows."""
    context = make_context([(135, 7)])
    out = attend(context)
    for kept in (1, 3, 6):
        cache = context.cache.clone()
        at = torch.arange(128 + kept, 135)
        cache[context.block_table[0, at // 16].long(), :, at % 16] = NAN
        poisoned = attend(replace(context, cache=cache))
        assert torch.equal(poisoned[:kept], out[:kept])
        assert poisoned[kept:].isnan().all()


def test_padding_has_no_effect() -> None:
    """Padded requests read block 0, whatever it holds; requests without rows write nothing; rows
    at the limit of the context repeat one position.
    """
    context = make_context([(100, 7), (33, 7)])
    out = attend(context)
    width = context.block_table.shape[1]
    table = torch.zeros(5, width + 9, dtype=torch.int32)
    table[[0, 2], :width] = context.block_table
    positions = torch.cat([context.positions, torch.zeros(14, dtype=torch.int32)])
    positions[11:14] = positions[11].clone()
    padded = replace(
        context,
        qkv=torch.cat([context.qkv, torch.full_like(context.qkv, NAN)]),
        block_table=table,
        query_start_loc=torch.tensor([0, 7, 7, 14, 21, 28], dtype=torch.int32),
        positions=positions,
    )
    for scratch in (WALK, SPLIT):
        assert torch.equal(attend(padded, scratch)[:12], out[:12])


def test_large_scores_do_not_overflow() -> None:
    """Without the running maximum, exp overflows and the row becomes NaN."""
    context = make_context([(CHUNK + 20, 2)])
    context = replace(context, qkv=context.qkv * 200)
    expected = attend(context, reference=True)
    for scratch in (WALK, SPLIT):
        torch.testing.assert_close(attend(context, scratch), expected, rtol=1e-3, atol=1e-3)


def test_a_head_too_wide_is_refused() -> None:
    shape = AttentionShape(2, 1, 320, 16, None)
    with pytest.raises(ValueError, match="head_dim=320"):
        TritonAttention(shape, torch.device("cpu"))
