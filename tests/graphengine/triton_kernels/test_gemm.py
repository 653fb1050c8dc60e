"""Matrix products, interpreted: values against torch, and bits that depend on a row alone."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from graphengine.triton_kernels.gemm import (
    BLOCK_M,
    LEAST_SCRATCH,
    TARGET_PROGRAMS,
    gate_up,
    linear,
    scratch_floats,
    tile_for,
)

DTYPES = (torch.float32, torch.float16)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-4}
# (n, k): odd sizes, one block of K, a split, one with an uneven last part, one of many splits.
SHAPES = [(7, 5), (40, 64), (33, 576), (70, 328), (16, 1024)]


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(rows, columns) / columns**0.25).to(dtype)


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, add_to: Tensor | None = None
) -> Tensor:
    """`linear` into an output of NaN, with the scratch of these rows, NaN too."""
    n, k = weight.shape
    out = torch.full((len(x), n), float("nan")) if add_to is None else add_to.clone()
    scratch = torch.full((scratch_floats(len(x), [(n, k)]),), float("nan"))
    linear(out, x, weight, bias, scratch, add=add_to is not None)
    return out


def gated(x: Tensor, weight: Tensor) -> Tensor:
    out = torch.full((len(x), len(weight) // 2), float("nan"))
    gate_up(out, x, weight, torch.empty(scratch_floats(len(x), [tuple(weight.shape)])))
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 17])
def test_values(dtype: torch.dtype, shape: tuple[int, int], rows: int) -> None:
    """Masks at every edge, the order of the splits' partials, bias and addition."""
    n, k = shape
    x, weight = matrix(rows, k), matrix(n, k, dtype)
    bias, residual = torch.randn(n), torch.randn(rows, n)
    expected = x.to(dtype).double() @ weight.double().T
    tolerance = TOLERANCE[dtype]
    for given_bias in (None, bias):
        for given_residual in (None, residual):
            wanted = expected + (0 if given_bias is None else bias)
            wanted = wanted + (0 if given_residual is None else residual)
            result = product(x, weight, given_bias, given_residual).double()
            torch.testing.assert_close(result, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("i", "k"), [(5, 40), (20, 576), (1100, 64)])
def test_gate_up(dtype: torch.dtype, i: int, k: int) -> None:
    """Gate and up, taken in turns by the tiles, must meet again with and without a split."""
    x, weight = matrix(3, k), matrix(2 * i, k, dtype)
    gate, up = (x.to(dtype).double() @ weight.double().T).chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(gated(x, weight).double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    """Rows beside it, its place among them, and NaN in a neighbour must not change a row."""
    x, weight = matrix(64, 328), matrix(34, 328, dtype)
    sample = (0, 31, 48, 57, 62, 63)
    alone = {row: product(x[row : row + 1], weight)[0] for row in sample}
    gated_alone = {row: gated(x[row : row + 1], weight)[0] for row in sample}
    for rows in (2, 7, 16, 17, 64):
        start = 64 - rows
        together, gated_together = product(x[start:], weight), gated(x[start:], weight)
        for row in [row for row in sample if row >= start]:
            assert torch.equal(together[row - start], alone[row])
            assert torch.equal(gated_together[row - start], gated_alone[row])
    spoiled = x[48:].clone()
    spoiled[3] = float("nan")
    out = product(spoiled, weight)
    assert out[3].isnan().all()
    assert torch.equal(out[9], alone[57])


def test_ranges_of_rows_have_the_bits_of_one_launch() -> None:
    """Where scratch holds few rows the call goes range by range, and bounds what it writes."""
    n, k = 33, 576
    x, weight = matrix(50, k), matrix(n, k)
    split = tile_for(n, k).split_k
    assert split > 1
    expected = product(x, weight)
    size = split * n * 2 * BLOCK_M
    scratch = torch.full((size + 100,), 7.0)
    out = torch.empty(50, n)
    linear(out, x, weight, None, scratch[: size + 50], add=False)
    assert torch.equal(out, expected)
    assert (scratch[size:] == 7.0).all()
    with pytest.raises(ValueError, match="scratch of 10 floats"):
        linear(out, x, weight, None, scratch[:10], add=False)


def test_tiles_fill_a_gpu_and_cover_k() -> None:
    """What a decode step's products are launched with: the sizes of SmolLM2 and of an 8B model."""
    small = [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)]
    large = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]
    for n, k in small + large:
        tile = tile_for(n, k)
        blocks = -(-k // tile.block_k)
        assert (tile.split_k - 1) * tile.steps(k) < blocks <= tile.split_k * tile.steps(k)
        programs = -(-n // tile.block_n) * tile.split_k
        if (n, k) in large:
            assert programs >= 0.9 * TARGET_PROGRAMS
        assert tile.split_k == 1 or programs < 2 * TARGET_PROGRAMS
    assert scratch_floats(1, [(128256, 4096)]) == 0
    assert scratch_floats(20, [(4096, 4096), (6144, 4096)]) == 20 * 3 * 6144


def test_the_least_scratch_holds_any_product() -> None:
    """A draft's matrices may be wider than the target's: 1024 against 576 of SmolLM2, say."""
    sizes = [*range(1, 600, 7), *range(600, 40_000, 331), 49152, 128256, 262144]
    for k in (64, 200, 1024, 4096, 8192, 65536):
        for n in sizes:
            tile = tile_for(n, k)
            assert tile.split_k == 1 or BLOCK_M * tile.split_k * n <= LEAST_SCRATCH, (n, k)
    n, k = 1024, 576  # runs with it
    x, weight, out = matrix(3, k), matrix(n, k), torch.zeros(3, n)
    linear(out, x, weight, None, torch.zeros(LEAST_SCRATCH), add=False)
    assert torch.allclose(out, x @ weight.T, atol=1e-4)
