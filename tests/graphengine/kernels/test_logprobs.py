"""row_logprobs: against torch, with ties, -inf and NaN among the numbers."""

from __future__ import annotations

import pytest
import torch

from tests.graphengine.kernels.calls import Kernels, empty


def run(
    kernels: Kernels, logits: torch.Tensor, chosen: list[int], width: int
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    num_rows, vocab = logits.shape
    ids, values = empty(num_rows, width, dtype=torch.int32), empty(num_rows, width)
    ranks = empty(num_rows, dtype=torch.int32)
    targets = torch.tensor(chosen, dtype=torch.int32)
    kernels.call("row_logprobs", ids, values, ranks, logits, targets, num_rows, vocab, width)
    return ids, values, ranks.tolist()


@pytest.mark.parametrize("vocab", [1, 5, 21, 1003])
@pytest.mark.parametrize("width", [1, 2, 21])
def test_values_ranks_and_the_likeliest(kernels: Kernels, vocab: int, width: int) -> None:
    """Guards a heap that loses a token, a rank off by one, and a vocabulary below the width."""
    logits = (5 * torch.randn(9, vocab)).round()  # rounded: with ties
    chosen = torch.randint(0, vocab, (9,)).tolist()
    ids, values, ranks = run(kernels, logits, chosen, width)
    expected = logits.double().log_softmax(-1)
    for row, token in enumerate(chosen):
        order = sorted(range(vocab), key=lambda v, row=row: (-float(logits[row, v]), v))
        want = [token, *order[: width - 1]]
        assert ids[row].tolist() == want + [-1] * (width - len(want))
        live = values[row, : len(want)].double()
        torch.testing.assert_close(live, expected[row, want], rtol=1e-6, atol=1e-6)
        assert ranks[row] == int((logits[row] > logits[row, token]).sum()) + 1


def test_what_cannot_come_is_left_out(kernels: Kernels) -> None:
    """Guards NaN that spreads over a row, and -inf among the likeliest."""
    inf, nan = float("inf"), float("nan")
    ids, values, ranks = run(kernels, torch.tensor([[1.0, nan, -inf, 3.0, 2.0]]), [0], 5)
    assert ids.tolist() == [[0, 3, 4, 0, -1]]
    expected = torch.tensor([1.0, 3.0, 2.0]).log_softmax(0)
    torch.testing.assert_close(values[0, :4], expected[[0, 1, 2, 0]])
    assert values[0, 4] == -inf
    assert ranks == [3]
