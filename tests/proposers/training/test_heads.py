"""The unroll of the training-time test against decoding, one row at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from proposers.training import Eagle3Flags
from proposers.training.heads import Eagle1, Eagle3, Head, Mtp
from tests.proposers.training import chains
from tests.proposers.training.conftest import SIZES, TAPS, make_batch, make_target

STEPS = 4
LENGTH = 9
Make = Callable[[], tuple[Head, chains.ChainHead]]


def randomised(head: Head) -> dict[str, torch.Tensor]:
    """The head's parameters, all drawn, norms too: a norm of ones could be left out unseen."""
    draw = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.3 * noise)
    return {name: tensor.detach() for name, tensor in head.state_dict().items()}


def eagle3(**flags: bool) -> tuple[Head, chains.ChainHead]:
    off = {"fc_norm": False, "norm_before_residual": False, "norm_output": False}
    said = Eagle3Flags(**(off | flags))
    ids = torch.tensor([1, 3, 4, 7, 9, 30])
    head = Eagle3(make_target(), SIZES, num_taps=len(TAPS), draft_ids=ids, flags=said)
    return head, chains.eagle3(SIZES, randomised(head), said)


def eagle1() -> tuple[Head, chains.ChainHead]:
    head = Eagle1(make_target(), SIZES)
    return head, chains.eagle1(SIZES, randomised(head))


def mtp() -> tuple[Head, chains.ChainHead]:
    head = Mtp(make_target(), SIZES)
    return head, chains.mtp(SIZES, randomised(head))


MAKERS: dict[str, Make] = {
    "eagle1": eagle1,
    "mtp": mtp,
    "eagle3": eagle3,
    "eagle3-fc-norm": lambda: eagle3(fc_norm=True),
    "eagle3-norm-before-residual": lambda: eagle3(norm_before_residual=True),
    "eagle3-norm-output": lambda: eagle3(norm_output=True),
    "eagle3-all": lambda: eagle3(fc_norm=True, norm_before_residual=True, norm_output=True),
}


@pytest.mark.parametrize("name", MAKERS)
def test_the_unroll_is_what_decoding_computes(name: str) -> None:
    """Guards keys, positions, tokens or states that training sees and decoding does not, at any
    step behind any start, with a shorter piece beside it.
    """
    head, reference = MAKERS[name]()
    batch = make_batch([LENGTH, LENGTH - 4])
    with torch.no_grad():
        steps = list(head.unroll(batch, STEPS))
        for piece, length in enumerate((LENGTH, LENGTH - 4)):
            embeds = make_target().embed[batch.token_ids[piece]]
            for start in range(length - 1):
                count = min(STEPS, length - 1 - start)
                rows = chains.decode(
                    reference,
                    embeds,
                    batch.aux[piece],
                    batch.final[piece],
                    start=start,
                    steps=count,
                )
                for step, row in enumerate(rows):
                    torch.testing.assert_close(steps[step][piece, start], row, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", MAKERS)
def test_every_parameter_learns(name: str) -> None:
    """Guards a part that is left out of the graph, and would be exported as it was drawn."""
    head, _ = MAKERS[name]()
    batch = make_batch([LENGTH])
    sum(head.logits(rows[0]).square().sum() for rows in head.unroll(batch, 2)).backward()
    for parameter_name, parameter in head.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.abs().sum() > 0, parameter_name


@pytest.mark.parametrize("name", MAKERS)
def test_the_targets_matrices_do_not_learn(name: str) -> None:
    """Guards an embedding that drifts away from the one that decoding looks tokens up in."""
    head, _ = MAKERS[name]()
    assert not any(name.startswith("target_") for name, _ in head.named_parameters())
    assert not any(name.startswith("target_") for name in head.state_dict())
