"""paged_attention: values, and bits that depend on nothing but what a row sees.

Values are held to the reference backend, and that to torch's own attention (`test_reference.py`).
"""

from dataclasses import replace

import pytest
import torch

from tests.graphengine.kernels.calls import Context, Kernels, reference_attention, threads

DTYPES = (torch.bfloat16, torch.float32)
BLOCK = 16


def make_context(
    requests: list[tuple[int, int]],
    *,
    heads: int = 6,
    kv_heads: int = 2,
    dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    window: int = 0,
    poison: float = float("nan"),
) -> Context:
    """Requests of (context length, last rows of it that are queries); unowned slots hold `poison`.

    The same request list gives the same numbers, whatever the poison and the window.
    """
    generator = torch.Generator().manual_seed(7)
    blocks = [-(-length // BLOCK) for length, _ in requests]
    num_blocks = sum(blocks) + 3
    order = torch.randperm(num_blocks - 1, generator=generator) + 1
    cache = torch.full((num_blocks, 2, BLOCK, kv_heads, dim), poison).to(dtype)
    table = torch.zeros(len(requests), max(blocks) + 2, dtype=torch.int32)
    positions = []
    for r, (length, rows) in enumerate(requests):
        mine = order[sum(blocks[:r]) : sum(blocks[: r + 1])]
        table[r, : blocks[r]] = mine.int()
        at = torch.arange(length)
        values = torch.randn(length, 2, kv_heads, dim, generator=generator)
        cache[mine[at // BLOCK], :, at % BLOCK] = values.to(dtype)
        positions.append(at[-rows:].int())
    starts = torch.tensor([0, *(rows for _, rows in requests)]).cumsum(0).int()
    qkv = torch.randn(int(starts[-1]), (heads + 2 * kv_heads) * dim, generator=generator)
    return Context(
        qkv=qkv,
        cache=cache,
        block_table=table,
        query_start_loc=starts,
        positions=torch.cat(positions),
        num_heads=heads,
        window=window,
    )


def one_row(context: Context, t: int) -> Context:
    """Row t as a batch of its own."""
    r = int((context.query_start_loc <= t).sum()) - 1
    return replace(
        context,
        qkv=context.qkv[t : t + 1].clone(),
        block_table=context.block_table[r : r + 1].clone(),
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        positions=context.positions[t : t + 1].clone(),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(9, 3, 64), (4, 4, 8), (8, 1, 40), (2, 1, 128), (2, 2, 256), (48, 1, 16)],
)
def test_matches_the_reference(
    kernels: Kernels, dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> None:
    """Head grouping, block look-up, chain mask and softmax, with every unowned slot NaN."""
    for window in (0, 5, 70):
        for requests in ([(1, 1)], [(130, 7), (64, 1), (3, 3), (257, 2)], [(150, 150)]):
            context = make_context(
                requests, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, window=window
            )
            expected = reference_attention(context)
            for scratch in (1 << 20, 0):
                out = kernels.attention(context, scratch).double()
                torch.testing.assert_close(out, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 40])
def test_bits_do_not_depend_on_batch_schedule_or_threads(
    kernels: Kernels, dtype: torch.dtype, window: int
) -> None:
    """Another grouping of rows, chunks or threads must not change one bit of a row."""
    requests = [(130, 7), (64, 1), (300, 2), (65, 65), (5, 5)]
    context = make_context(requests, dtype=dtype, window=window)
    out = kernels.attention(context)
    assert out.isfinite().all()
    for count in (1, 2, 3):
        with threads(count):
            for scratch in (1 << 20, 0, 100):
                assert torch.equal(kernels.attention(context, scratch), out)
            for t in range(0, len(out), 3):
                for scratch in (1 << 20, 0):
                    assert torch.equal(kernels.attention(one_row(context, t), scratch)[0], out[t])


@pytest.mark.parametrize("rows", [1, 3, 7, 64, 200])
def test_prefill_boundaries_do_not_change_bits(kernels: Kernels, rows: int) -> None:
    """A prompt computed in chunks of any size, or decoded row by row, gives the same rows."""
    whole = make_context([(200, 200)])
    out = kernels.attention(whole)
    for first in range(0, 200, rows):
        last = min(200, first + rows)
        part = replace(
            whole,
            qkv=whole.qkv[first:last].clone(),
            positions=whole.positions[first:last].clone(),
            query_start_loc=torch.tensor([0, last - first], dtype=torch.int32),
        )
        assert torch.equal(kernels.attention(part), out[first:last])


def test_unowned_slots_have_no_effect(kernels: Kernels) -> None:
    """NaN, infinity or numbers in slots that a row may not see must not reach it."""
    requests = [(130, 7), (18, 3), (77, 77)]
    clean = kernels.attention(make_context(requests, poison=0.0))
    for poison in (float("nan"), float("inf"), 1e30):
        assert torch.equal(kernels.attention(make_context(requests, poison=poison)), clean)


def test_future_drafts_have_no_effect(kernels: Kernels) -> None:
    """Draft i sees drafts before it only: a poisoned later draft changes no earlier row."""
    context = make_context([(135, 7)])
    out = kernels.attention(context)
    for kept in range(1, 7):
        cache = context.cache.clone()
        at = torch.arange(128 + kept, 135)
        cache[context.block_table[0, at // BLOCK].long(), :, at % BLOCK] = float("nan")
        poisoned = kernels.attention(replace(context, cache=cache))
        assert torch.equal(poisoned[:kept], out[:kept])
        assert poisoned[kept:].isnan().all()


def test_table_and_batch_padding_have_no_effect(kernels: Kernels) -> None:
    """Padded requests read block 0, whatever it holds, and leave live rows as they are."""
    context = make_context([(100, 7), (33, 7)])
    out = kernels.attention(context)
    table = torch.zeros(4, context.block_table.shape[1] + 9, dtype=torch.int32)
    table[:2, : context.block_table.shape[1]] = context.block_table
    padded = replace(
        context,
        qkv=torch.cat([context.qkv, torch.full_like(context.qkv, float("nan"))]),
        block_table=table,
        query_start_loc=torch.tensor([0, 7, 14, 21, 28], dtype=torch.int32),
        positions=torch.cat([context.positions, torch.zeros(14, dtype=torch.int32)]),
    )
    assert torch.equal(kernels.attention(padded)[:14], out)


def test_clipped_tail_rows_leave_live_rows_alone(kernels: Kernels) -> None:
    """Tail rows at the context limit repeat one position; rows need not be consecutive."""
    context = make_context([(96, 7)])
    out = kernels.attention(context)
    positions = context.positions.clone()
    positions[3:] = 95
    clipped = kernels.attention(replace(context, positions=positions))
    assert torch.equal(clipped[:3], out[:3])


def test_large_scores_do_not_overflow(kernels: Kernels) -> None:
    """Without the running maximum, exp overflows and the row becomes NaN."""
    context = make_context([(200, 2)])
    context = replace(context, qkv=context.qkv * 200)
    torch.testing.assert_close(
        kernels.attention(context).double(), reference_attention(context), rtol=1e-3, atol=1e-4
    )
