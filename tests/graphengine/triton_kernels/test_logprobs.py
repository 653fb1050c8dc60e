"""row_logprobs: against torch and the native kernel, with ties, -inf and NaN among the numbers."""

from __future__ import annotations

import pytest
import torch

from graphengine.kernels.library import load
from tests.graphengine.kernels.calls import Kernels
from tests.graphengine.kernels.test_logprobs import run
from tests.graphengine.kernels.test_logprobs import (
    test_values_ranks_and_the_likeliest as check_values_and_ranks,
)
from tests.graphengine.kernels.test_logprobs import (
    test_what_cannot_come_is_left_out as check_what_cannot_come,
)

pytest.importorskip("triton")

from graphengine.triton_kernels import chunks
from tests.graphengine.triton_kernels.launchers import Launchers

TRITON = Launchers()


@pytest.mark.parametrize(("vocab", "width"), [(1, 2), (5, 21), (21, 1), (300, 21)])
def test_values_ranks_and_the_likeliest(vocab: int, width: int) -> None:
    """Guards a lost token, a rank off by one, and a vocabulary below the width."""
    check_values_and_ranks(TRITON, vocab, width)


def test_what_cannot_come_is_left_out() -> None:
    check_what_cannot_come(TRITON)


@pytest.mark.parametrize("size", [16, 64])
def test_chunks_are_joined(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a chunk without a number, ties across chunks, and more asked for than a chunk has."""
    monkeypatch.setattr(chunks, "CHUNK", size)
    logits = (5 * torch.randn(3, 150, generator=torch.Generator().manual_seed(0))).round()
    logits[1, :70] = float("-inf")
    logits[2, 100:] = float("nan")
    chosen = [100, 149, 3]
    ids, values, ranks = run(TRITON, logits, chosen, 21)
    wanted = run(Kernels(load()), logits, chosen, 21)
    assert torch.equal(ids, wanted[0])
    torch.testing.assert_close(values, wanted[1], rtol=1e-6, atol=1e-6)
    assert ranks == wanted[2]


def test_a_row_is_the_same_in_any_company() -> None:
    logits = 4 * torch.randn(17, 90, generator=torch.Generator().manual_seed(1))
    chosen = list(range(17))
    ids, values, _ = run(TRITON, logits, chosen, 6)
    for rows in (slice(0, 1), slice(3, 5), slice(16, 17)):
        again = run(TRITON, logits[rows].contiguous(), chosen[rows], 6)
        assert torch.equal(again[0], ids[rows])
        assert torch.equal(again[1].view(torch.int32), values[rows].view(torch.int32))
