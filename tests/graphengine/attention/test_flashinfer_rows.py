"""FlashInferAttention over the double: what FlashInfer reads is what the engine's rows say."""

import pytest
import torch

from graphengine.attention.base import plan
from tests.graphengine.attention.flashinfer_double import (
    BLOCK,
    SHAPE,
    SIZES,
    NativeDouble,
    make_attention,
    make_rows,
)


@pytest.mark.parametrize("query_len", [1, 2, 4])
@pytest.mark.parametrize("num_reqs", [1, 2, 4, 8])
def test_cells_equal_the_reference(native: NativeDouble, num_reqs: int, query_len: int) -> None:
    """Lengths at, before and behind the edge of a block, for every cell of the table."""
    attention = make_attention()
    for first in (0, 1, BLOCK - query_len, BLOCK, 3 * BLOCK - 1):
        pasts = [max(0, (first + 3 * index) % 25) for index in range(num_reqs)]
        rows = make_rows([(past, query_len) for past in pasts])
        torch.testing.assert_close(rows.run(attention), rows.reference(), rtol=0, atol=0)


def test_shrinking_batches_with_padding(native: NativeDouble) -> None:
    """8 -> 7 -> 3 -> 1 -> 4: padding requests keep their rows, over the null block, and a cell's
    plan never changes; stale pages of a longer batch reach nobody.
    """
    attention = make_attention()
    for live, cell in ((8, 8), (7, 8), (3, 4), (1, 1), (4, 4), (8, 8)):
        requests = [(5 + 2 * index, 4) for index in range(live)] + (cell - live) * [(0, 4)]
        needed = [-(-(past + rows) // BLOCK) for past, rows in requests]
        rows = make_rows(requests, allocated=needed[:live] + (cell - live) * [0])
        assert torch.equal(rows.run(attention), rows.reference())
        call = native.plans[-1]
        assert call["batch_size"] == cell
        assert call["qo_indptr"].tolist() == list(range(0, 4 * cell + 1, 4))
        assert call["kv_len_arr"][live:].tolist() == (cell - live) * [4]


def test_live_rows_of_ragged_drafts_are_those_of_shorter_cells(native: NativeDouble) -> None:
    """A request with 1 draft among rows of 4, its tail in pages it does not have: its live rows
    are those of a step that has no tail. At a block edge, and with an exhausted pool.
    """
    past = 2 * BLOCK - 2  # two live rows fill the block; the tail would need another one
    long = make_rows([(past, 4), (6, 4)], allocated=[2, 3])
    attention = make_attention()
    out = long.run(attention)
    short = make_rows([(past, 2), (6, 2)], allocated=[2, 3])
    assert torch.equal(short.batch.block_table, long.batch.block_table)
    qkv = long.qkv.view(2, 4, -1)[:, :2].reshape(4, -1)
    alone = torch.full((4, out.shape[1]), torch.nan)
    attention.plan(short.batch, short.host)
    attention.run(alone, qkv, long.cache, short.batch)
    assert torch.equal(out.view(2, 4, -1)[:, :2].reshape(4, -1), alone)


def test_tail_rows_at_the_context_limit(native: NativeDouble) -> None:
    """Their pages lie beyond the table: the null block stands in, and live rows stay as they
    are.
    """
    limit = SIZES.max_blocks * BLOCK
    rows = make_rows([(limit - 1, 4), (limit - 2, 4)], max_position=limit - 1)
    out, expected = rows.run(make_attention()), rows.reference()
    for live in (0, 4, 5):  # one row up to the limit, and two
        assert torch.equal(out[live], expected[live])
    (call,) = native.plans
    assert call["kv_len_arr"].tolist() == [limit + 3, limit + 2]
    assert call["kv_indptr"].tolist() == [0, SIZES.max_blocks + 1, 2 * SIZES.max_blocks + 2]


@pytest.mark.parametrize(
    "chunks",
    [
        [(0, 1)],
        [(0, 13)],
        [(4, 8), (0, 5), (17, 1)],
        [(index, 2 + index % 5) for index in range(7)],
        [(0, 27), (5, 27), (0, 10)],
    ],
)
def test_prefill_chunks_equal_the_reference(
    native: NativeDouble, chunks: list[tuple[int, int]]
) -> None:
    """Ragged chunks, fewer requests than the wrapper has: those left have no rows and no pages."""
    rows = make_rows(chunks)
    assert torch.equal(rows.run(make_attention()), rows.reference())


def test_prefill_and_cells_take_turns(native: NativeDouble) -> None:
    """One wrapper serves all prefill, in graph mode too; a plan of it leaves the cells' alone."""
    attention = make_attention()
    cell, chunk, other = make_rows([(9, 2)]), make_rows([(0, 3), (2, 9)]), make_rows([(1, 30)])
    for rows in (cell, chunk, cell, other, cell):
        assert torch.equal(rows.run(attention), rows.reference())
    prefill = [call for call in native.plans if call["batch_size"] == SIZES.max_num_reqs]
    assert [call["total_num_rows"] for call in prefill] == 2 * [64]
    assert len({call["int_workspace_buffer"].data_ptr() for call in native.plans}) == 2


def test_plan_by_the_device_alone(native: NativeDouble) -> None:
    """Start-up and the probe have no host rows: `plan` reads the batch, with the same lengths."""
    rows, attention = make_rows([(7, 3), (0, 2)]), make_attention()
    plan(attention, rows.batch)
    assert native.plans[0]["kv_len_arr"].tolist()[:2] == [10, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_caches(native: NativeDouble, dtype: torch.dtype) -> None:
    """q is rounded to the cache's dtype on its way in, the output on its way out, once each."""
    rows, attention = make_rows([(9, 4), (2, 4)], dtype=dtype), make_attention(dtype)
    out = rows.run(attention)
    q_columns = SHAPE.num_heads * SHAPE.head_dim
    rows.qkv[:, :q_columns] = rows.qkv[:, :q_columns].to(dtype)
    rounded = rows.reference().to(dtype).float()
    assert torch.equal(out, rounded)


def test_stale_rows_of_a_larger_batch_do_not_matter(native: NativeDouble) -> None:
    """The static q and output hold a larger batch's rows; a smaller one sees none of them."""
    attention = make_attention()
    make_rows([(0, 40)]).run(attention)
    attention._q[:] = torch.nan
    attention._attended[:] = torch.nan
    rows = make_rows([(3, 2), (8, 2)])
    assert torch.equal(rows.run(attention), rows.reference())
