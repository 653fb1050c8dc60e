"""rope_write, interpreted: values, cache layout and rounding, the null block, bits of a row."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from graphengine.models import torch_ops
from graphengine.models.layers import Rope
from graphengine.triton_kernels.rope import rope_write
from tests.graphengine.kernels.calls import empty

DTYPES = (torch.float32, torch.float16)
HEADS = [(3, 1, 16), (2, 2, 24), (4, 2, 8)]
BLOCK_SIZE, MAX_LEN, EPS = 4, 50, 1e-5
# With a norm, twin and kernel differ in the order of a sum and in 1 / sqrt against rsqrt.
TOLERANCE = {"rtol": 2e-6, "atol": 1e-6}


@dataclass
class Rows:
    """What a call is given; every row has a slot of its own, none in the null block."""

    qkv: Tensor
    tables: tuple[Tensor, Tensor]
    positions: Tensor
    slots: Tensor
    norms: tuple[Tensor, Tensor] | None
    num_heads: int
    kv_heads: int
    dim: int


def make_rows(rows: int, heads: tuple[int, int, int], *, normed: bool) -> Rows:
    num_heads, kv_heads, dim = heads
    angles = torch.rand(MAX_LEN, dim // 2) * 6
    slots = torch.randperm(rows + 5)[:rows] + BLOCK_SIZE
    return Rows(
        qkv=torch.randn(rows, (num_heads + 2 * kv_heads) * dim),
        tables=(angles.cos(), angles.sin()),
        positions=torch.randint(0, MAX_LEN, (rows,), dtype=torch.int32),
        slots=slots.int(),
        norms=(torch.randn(dim), torch.randn(dim)) if normed else None,
        num_heads=num_heads,
        kv_heads=kv_heads,
        dim=dim,
    )


def cache_for(rows: Rows, dtype: torch.dtype) -> Tensor:
    blocks = 2 + (len(rows.qkv) + 5) // BLOCK_SIZE
    return empty(blocks, 2, BLOCK_SIZE, rows.kv_heads, rows.dim, dtype=dtype)


def run(rows: Rows, cache: Tensor, only: slice = slice(None)) -> Tensor:
    """Rotated rows; the cache is written."""
    qkv = rows.qkv[only].clone()
    given = (rows.positions[only], rows.slots[only])
    rope = Rope(*rows.tables, rows.num_heads, rows.kv_heads, rows.dim, BLOCK_SIZE)
    norms = rows.norms or (None, None)
    rope_write(qkv, cache, rows.tables, given, norms, rope=rope, eps=EPS)
    return qkv


def twin(rows: Rows, cache: Tensor) -> Tensor:
    heads = rows.qkv.clone().view(len(rows.qkv), -1, rows.dim)
    if rows.norms is not None:
        torch_ops.norm_heads(heads, *rows.norms, rows.kv_heads, torch.tensor([EPS]))
    torch_ops.rotate(heads, *rows.tables, rows.positions, rows.kv_heads)
    torch_ops.write_kv(cache, heads, rows.slots, rows.kv_heads)
    return heads.flatten(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_values_and_layout(dtype: torch.dtype, normed: bool, heads: tuple[int, int, int]) -> None:
    """Rotation style, norm of q and k and not of v, planes and heads of the cache, its rounding."""
    rows = make_rows(7, heads, normed=normed)
    cache, twins = cache_for(rows, dtype), cache_for(rows, dtype)
    out, expected = run(rows, cache), twin(rows, twins)
    assert torch.equal(cache.isnan(), twins.isnan())
    if normed:
        torch.testing.assert_close(out, expected, **TOLERANCE)
        # Not the twin's own, whose bits are not quite these: what was rotated, rounded once.
        torch_ops.write_kv(twins, out.view(7, -1, rows.dim), rows.slots, rows.kv_heads)
    else:
        assert torch.equal(out, expected)  # products and sums are rounded alike
    assert torch.equal(cache.nan_to_num(7.0), twins.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_null_block_is_left_alone(dtype: torch.dtype) -> None:
    """Padding rows share its slots, whatever they hold: to store there would be a data race."""
    rows = make_rows(9, (3, 1, 16), normed=True)
    full, cache = cache_for(rows, dtype), cache_for(rows, dtype)
    out = run(rows, full)
    rows.slots[::3] = torch.tensor([0, 3, 0], dtype=torch.int32)
    rows.qkv[3] = float("nan")
    padded = run(rows, cache)
    live = [row for row in range(9) if row != 3]
    assert torch.equal(padded[live], out[live])
    assert cache[0].isnan().all()
    kept = rows.slots[rows.slots >= BLOCK_SIZE].long()
    kept_at = (kept // BLOCK_SIZE, slice(None), kept % BLOCK_SIZE)
    assert torch.equal(cache[kept_at], full[kept_at])
    assert cache.isfinite().sum() == full[kept_at].numel()


def test_a_row_has_the_same_bits_in_any_company() -> None:
    """Rows beside it and its place among them must not change a row, here or in the cache."""
    rows = make_rows(64, (3, 1, 16), normed=True)
    sample = (0, 31, 48, 57, 62, 63)
    cache = cache_for(rows, torch.float32)
    alone = {row: run(rows, cache, slice(row, row + 1))[0] for row in sample}
    for count in (2, 7, 16, 17, 64):
        start, company = 64 - count, cache_for(rows, torch.float32)
        together = run(rows, company, slice(start, None))
        for row in [row for row in sample if row >= start]:
            block, offset = divmod(int(rows.slots[row]), BLOCK_SIZE)
            assert torch.equal(together[row - start], alone[row])
            assert torch.equal(company[block, :, offset], cache[block, :, offset])
