"""linear and gate_up: right values, and bits that do not depend on M, tiles, threads or dtype."""

import pytest
import torch
import torch.nn.functional as F

from graphengine.kernels.build import build
from graphengine.kernels.library import bind
from tests.graphengine.kernels.calls import Kernels, threads
from tests.graphengine.kernels.conftest import FLOATS, PORTABLE

# Of this CPU, of this CPU without its products of bf16 pairs, and of any.
BUILDS = {"native": (), "floats": FLOATS, "portable": PORTABLE}

DTYPES = (torch.bfloat16, torch.float32)
# K below one vector, not a multiple of a vector, of SmolLM2's sizes; N not a multiple of any tile.
SHAPES = ((7, 5), (50, 37), (101, 576), (35, 1536), (1, 64), (130, 200))
ROWS = (*range(1, 34), 64, 129, 300)


@pytest.fixture(scope="module", params=BUILDS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    library = bind(build(BUILDS[request.param]).library)
    if request.param != "native":
        assert not library.rounds_activations(), "these sums are of floats"
    return Kernels(library)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 5, 7, 8, 19, 70])
def test_linear_matches_float64(kernels: Kernels, dtype: torch.dtype, rows: int) -> None:
    """A tile that drops the K tail, an N remainder, the bias or the residual gives wrong values."""
    for n, k in SHAPES:
        x, w, bias = torch.randn(rows, k), torch.randn(n, k).to(dtype), torch.randn(n)
        residual = torch.randn(rows, n)
        exact = kernels.operand(x, w).double() @ w.double().T
        torch.testing.assert_close(kernels.linear(x, w).double(), exact, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(
            kernels.linear(x, w, bias).double(), exact + bias, rtol=1e-5, atol=1e-4
        )
        out = kernels.linear(x, w, bias, residual)
        torch.testing.assert_close(out.double(), residual + exact + bias, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(101, 576), (35, 1541), (50, 37)])
def test_a_row_has_the_same_bits_in_every_batch(
    kernels: Kernels, dtype: torch.dtype, n: int, k: int
) -> None:
    """A tile with another K order would let a neighbour row change a token."""
    x, w = torch.randn(max(ROWS), k), torch.randn(n, k).to(dtype)
    bias, residual = torch.randn(n), torch.randn(max(ROWS), n)
    alone = torch.cat(
        [kernels.linear(x[i : i + 1], w, bias, residual[i : i + 1]) for i in range(len(x))]
    )
    for rows in ROWS:
        for first in {0, max(ROWS) - rows, (max(ROWS) - rows) // 2}:
            here = slice(first, first + rows)
            out = kernels.linear(x[here], w, bias, residual[here])
            assert torch.equal(out, alone[here]), f"{rows} rows from {first} differ from one row"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("i", "k"), [(96, 576), (37, 45)])
def test_gate_up_has_the_same_bits_in_every_batch(
    kernels: Kernels, dtype: torch.dtype, i: int, k: int
) -> None:
    """The vector tail of silu must round as its body does."""
    x, w = torch.randn(max(ROWS), k), torch.randn(2 * i, k).to(dtype)
    alone = torch.cat([kernels.gate_up(x[r : r + 1], w) for r in range(len(x))])
    for rows in ROWS:
        assert torch.equal(kernels.gate_up(x[-rows:], w), alone[-rows:]), f"{rows} rows differ"


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_up_matches_float64(kernels: Kernels, dtype: torch.dtype) -> None:
    """Gate and up swapped, or silu of the wrong half, gives wrong values; so would overflow."""
    for rows, i, k in ((1, 37, 45), (7, 64, 576), (60, 33, 16)):
        x, w = torch.randn(rows, k), (torch.randn(2 * i, k) * 4 / k**0.5).to(dtype)
        gate, up = (kernels.operand(x, w).double() @ w.double().T).split(i, 1)
        out = kernels.gate_up(x, w)
        torch.testing.assert_close(out.double(), F.silu(gate) * up, rtol=1e-5, atol=1e-5)
    extreme = torch.tensor([[2.0**14], [-(2.0**14)], [128.0], [-128.0], [0.0], [float("nan")]])
    out = kernels.gate_up(extreme, torch.ones(2, 1, dtype=dtype))[:, 0]
    torch.testing.assert_close(
        out, torch.tensor([2.0**28, 0.0, 2.0**14, 0.0, 0.0, float("nan")]), equal_nan=True
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_threads_do_not_change_bits(kernels: Kernels, dtype: torch.dtype, rows: int) -> None:
    """A share that starts inside a tile must compute its rows as the whole does."""
    x, w, gated = torch.randn(rows, 300), torch.randn(211, 300), torch.randn(2 * 107, 300)
    w, gated = w.to(dtype), gated.to(dtype)
    with threads(1):
        one = kernels.linear(x, w), kernels.gate_up(x, gated)
    for count in (2, 3):
        with threads(count):
            assert torch.equal(kernels.linear(x, w), one[0])
            assert torch.equal(kernels.gate_up(x, gated), one[1])


@pytest.mark.parametrize("rows", [1, 7, 16, 200])
def test_bf16_weights_equal_their_widened_copy(kernels: Kernels, rows: int) -> None:
    """Both dtypes must run the same arithmetic, with one rounding of x where the CPU has it so."""
    x, w = torch.randn(rows, 333), torch.randn(51, 333).bfloat16()
    gated = torch.randn(2 * 51, 333).bfloat16()
    taken = kernels.operand(x, w)
    pairs = (
        (kernels.linear(x, w), kernels.linear(taken, w.float())),
        (kernels.gate_up(x, gated), kernels.gate_up(taken, gated.float())),
    )
    for ours, widened in pairs:
        if kernels.library.rounds_activations():  # sums run in another order
            torch.testing.assert_close(ours, widened, rtol=1e-5, atol=1e-4)
        else:
            assert torch.equal(ours, widened)


@pytest.mark.parametrize("odd", [0, 1, 5])
def test_what_is_rounded_does_not_depend_on_the_rows_beside_it(kernels: Kernels, odd: int) -> None:
    """The rounding goes by whole vectors, the last one cut: its values are as any other's."""
    x, w = torch.randn(9, 32 + odd), torch.eye(32 + odd).bfloat16()
    x[:, -1] = torch.tensor([1e-41, -1e-41, 3e38, -3e38, 2.0, 1e-39, 0.0, 1.0, -0.0])
    alone = torch.cat([kernels.linear(x[i : i + 1], w) for i in range(len(x))])
    assert torch.equal(kernels.linear(x, w), alone)


def test_linear_writes_only_its_output(kernels: Kernels) -> None:
    """A tile that stores past N or M would corrupt the next static buffer."""
    for rows in (1, 3, 8, 33):
        guarded = torch.full((rows * 50 + 64,), 7.0)
        x, w = torch.randn(rows, 64), torch.randn(50, 64)
        kernels.call("linear_f32", guarded, x, w, None, rows, 50, 64, 0)
        assert torch.equal(guarded[rows * 50 :], torch.full((64,), 7.0))
