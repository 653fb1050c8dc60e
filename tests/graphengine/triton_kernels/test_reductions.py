"""rms_norm and argmax, interpreted: values, ties, numbers that are none, bits of a row alone."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from graphengine.models import torch_ops
from graphengine.triton_kernels import rows as kernels
from tests.graphengine.kernels.calls import empty
from tests.graphengine.kernels.test_rows import PLANTED

EPS = 1e-5
NAN, INF = float("nan"), float("inf")
# Twin and kernel differ in the order of a sum, and in 1 / sqrt against rsqrt: a few units of the
# last place of fp32.
TOLERANCE = {"rtol": 1e-6, "atol": 1e-7}


@pytest.fixture(autouse=True)
def _smaller_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "NORM_COLUMNS", 128)
    monkeypatch.setattr(kernels, "CHUNK", 64)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    out = empty(*x.shape)
    kernels.rms_norm(out, x.clone(), weight, eps=EPS)
    return out


@pytest.mark.parametrize("width", [1, 5, 64, 128, 130, 300])
def test_rms_norm(width: int) -> None:
    """One block, a part of one, several; a row of zeros, which eps alone keeps finite."""
    x, weight = torch.randn(3, width), torch.randn(width)
    x[1] = 0.0
    twin = empty(3, width)
    torch_ops.rms_norm(twin, x, weight, torch.tensor([EPS]))
    out = normed(x, weight)
    torch.testing.assert_close(out, twin, **TOLERANCE)
    assert not out[1].any()
    in_place = x.clone()
    kernels.rms_norm(in_place, in_place, weight, eps=EPS)
    assert torch.equal(in_place, out)


def test_a_normed_row_has_the_same_bits_in_any_company() -> None:
    """Rows beside it, its place among them, and NaN in a neighbour must not change a row."""
    x, weight = torch.randn(64, 300), torch.randn(300)
    sample = (0, 31, 48, 57, 62, 63)
    alone = {row: normed(x[row : row + 1], weight)[0] for row in sample}
    for rows in (2, 7, 16, 17, 64):
        start = 64 - rows
        spoiled = x[start:].clone()
        spoiled[1 if rows > 2 else 0] = NAN
        for given, places in ((x[start:], sample), (spoiled, (63,))):
            together = normed(given, weight)
            for row in [row for row in places if row >= start]:
                assert torch.equal(together[row - start], alone[row])


def test_unaligned_rows_are_refused() -> None:
    """They would take another compiled kernel, whose order of adding is its own."""
    numbers = torch.randn(2 * 5)
    with pytest.raises(AssertionError, match="aligned"):
        kernels.rms_norm(empty(1, 5), numbers[5:].view(1, 5), torch.ones(5), eps=EPS)


def largest(logits: Tensor) -> Tensor:
    out = empty(len(logits), dtype=torch.int32)
    scratch = empty(kernels.argmax_floats(*logits.shape))
    values, indices = scratch.chunk(2)
    kernels.argmax(out, logits, values, indices.view(torch.int32))
    return out


@pytest.mark.parametrize("vocab", [1, 3, 64, 65, 300])
@pytest.mark.parametrize("rows", [1, 7])
def test_argmax_breaks_ties_to_the_lowest_id(rows: int, vocab: int) -> None:
    """Few values, so that ties lie within a chunk and across many."""
    logits = torch.randint(0, 3, (rows, vocab)).float()
    lowest = (logits == logits.amax(1, keepdim=True)).int().argmax(1).int()
    assert torch.equal(largest(logits), lowest)


@pytest.mark.parametrize("vocab", [9, 64, 300])
def test_argmax_with_nan_infinities_and_ties(vocab: int) -> None:
    """NaN never wins, over -inf either; ties go to the lowest; only NaN gives 0."""
    planted = PLANTED[:, :-1]
    expected = PLANTED[:, -1].int() + vocab - 9
    logits = torch.full((len(planted), vocab), NAN)
    logits[:, -9:] = planted
    assert torch.equal(largest(logits), torch.where(planted.isnan().all(1), 0, expected))


@pytest.mark.parametrize("vocab", [200, 300])
def test_argmax_is_that_of_its_twin_wherever_what_lies(vocab: int) -> None:
    """A chunk of NaN alone before, between and behind others; -inf in one and NaN in another."""
    generator = torch.Generator().manual_seed(vocab)
    values = torch.tensor([NAN, -INF, -0.0, 0.0, 2.0, INF])
    for most in range(1, len(values) + 1):
        logits = values[torch.randint(0, most, (8, vocab), generator=generator)]
        logits[::2, :64] = NAN
        logits[1::3, 128:192] = NAN
        twin = empty(8, dtype=torch.int32)
        torch_ops.argmax(twin, logits)
        assert torch.equal(largest(logits), twin)
