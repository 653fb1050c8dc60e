"""Loss and acceptance against loops over rows."""

from __future__ import annotations

import pytest
import torch

from proposers.training import Eagle3Flags
from proposers.training.batches import Batch, batch_order, in_order, shifted
from proposers.training.heads import Draft, Eagle3
from proposers.training.objective import Acceptance, Objective
from proposers.training.small_llama import SmallLlama
from tests.proposers.training.conftest import SIZES, TAPS, VOCAB_SIZE, make_batch, make_target

IDS = torch.tensor([*range(0, VOCAB_SIZE, 2), 3])[:20].sort().values
STEPS, DECAY = 3, 0.5


def make_draft(name: str) -> tuple[Draft, Objective, torch.Tensor]:
    torch.manual_seed(0)
    target = make_target()
    if name == "draft_model":
        draft: Draft = SmallLlama(SIZES, num_layers=1, vocab_size=VOCAB_SIZE)
        objective = Objective(target, None, steps=STEPS, decay=DECAY)
        return draft, objective, torch.arange(VOCAB_SIZE)
    flags = Eagle3Flags()
    draft = Eagle3(target, SIZES, num_taps=len(TAPS), draft_ids=IDS, flags=flags)
    return draft, Objective(target, IDS, steps=STEPS, decay=DECAY), IDS


def logits_of(draft: Draft, batch: Batch) -> list[torch.Tensor]:
    """[B, L, draft vocabulary] a step."""
    with torch.no_grad():
        return [
            draft.logits(rows.flatten(0, 1)).unflatten(0, rows.shape[:2])
            for rows in draft.unroll(batch, STEPS)
        ]


@pytest.mark.parametrize("name", ["eagle3", "draft_model"])
def test_loss_is_the_cross_entropy_of_rows_that_can_be_right(name: str) -> None:
    """Guards a row that is compared with the target one place off, rows of prompts or padding, rows
    whose token cannot be drafted, and a distribution that is not renormalised.
    """
    draft, objective, ids = make_draft(name)
    batch = make_batch([9, 6], first=3)
    head, expected, weights = make_target().lm_head, 0.0, 0.0
    for step, logits in enumerate(logits_of(draft, batch)):
        losses = []
        for piece, length in enumerate((9, 6)):
            for start in range(length):
                token = start + step + draft.ahead  # the one that the row predicts
                if not 3 <= token < length or batch.greedy_ids[piece, token - 1] not in ids:
                    continue
                wanted = torch.softmax(head[ids] @ batch.final[piece, token - 1], dim=0)
                losses.append(-(wanted * torch.log_softmax(logits[piece, start], 0)).sum())
        assert losses
        expected += DECAY**step * float(torch.stack(losses).mean())
        weights += DECAY**step
    found = float(objective.loss(draft, batch).detach())
    assert found == pytest.approx(expected / weights, rel=1e-4)


@pytest.mark.parametrize("name", ["eagle3", "draft_model"])
def test_acceptance_follows_each_chain(name: str) -> None:
    """Guards drafts that are counted although one before them was wrong, or although the text went
    on otherwise, and a draft model's later drafts.
    """
    draft, objective, ids = make_draft(name)
    batch = make_batch([30, 21], first=2)
    logits = logits_of(draft, batch)
    likeliest = [ids[step.argmax(-1)] for step in logits]
    # Make some drafts right and some of the text greedy, or nothing would be accepted.
    draw = torch.Generator().manual_seed(9)
    greedy, token_ids = batch.greedy_ids.clone(), batch.token_ids.clone()
    for piece, length in enumerate((30, 21)):
        for position in range(draft.ahead, length):
            if torch.rand((), generator=draw) < 0.7:
                greedy[piece, position - 1] = likeliest[0][piece, position - draft.ahead]
    batch = Batch(
        token_ids=token_ids,
        counts=batch.counts,
        greedy_ids=greedy,
        aux=batch.aux,
        final=batch.final,
    )
    drafted, accepted = [0] * STEPS, [0] * STEPS
    for piece, length in enumerate((30, 21)):
        for start in range(length):
            for step in range(STEPS):
                token = start + step + draft.ahead
                if not 2 <= token < length:
                    break
                row = (
                    likeliest[step][piece, start]
                    if draft.chains
                    else likeliest[0][piece, start + step]
                )
                drafted[step] += 1
                if row != greedy[piece, token - 1]:
                    break
                accepted[step] += 1
                if token_ids[piece, token] != greedy[piece, token - 1]:
                    break
    found = objective.acceptance(draft, batch)
    assert (found.drafted, found.accepted) == (drafted, accepted)
    assert accepted[0] > 5


def test_rates_and_length_of_acceptance() -> None:
    """Guards the number that a recipe is judged by."""
    found = Acceptance([], []) + Acceptance([6, 2, 0], [3, 1, 0]) + Acceptance([4, 2, 2], [2, 1, 1])
    assert found.rates == [0.5, 0.5, 0.5]
    assert found.mean_length == 1 + 0.5 + 0.25 + 0.125
    assert Acceptance([4, 0], [0, 0]).rates == [0.0, 0.0]


def test_shifted_rows_end_in_nothing() -> None:
    """Guards the next piece, or the start of the same, behind an end."""
    x = torch.arange(1, 7).view(2, 3)
    assert shifted(x, 1).tolist() == [[2, 3, 0], [5, 6, 0]]
    assert shifted(x, 0).tolist() == x.tolist()
    assert shifted(x > 0, 4).tolist() == [[False] * 3] * 2
    assert shifted(x[..., None].float(), 2)[..., 0].tolist() == [[3, 0, 0], [6, 0, 0]]


def test_an_epoch_has_every_piece_once() -> None:
    """Guards pieces that are never trained on, batches that do not fit, and an order that a resumed
    run would not repeat.
    """
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(8, 65, (300,), generator=draw).tolist()
    order, again = batch_order(lengths, 128, seed=3), batch_order(lengths, 128, seed=3)
    for _ in range(2):
        seen: list[int] = []
        while len(seen) < len(lengths):
            batch = next(order)
            assert batch == next(again)
            assert len(batch) * max(lengths[index] for index in batch) <= 128
            seen += batch
        assert sorted(seen) == list(range(len(lengths)))
    all_once = [index for batch in in_order(lengths, 128) for index in batch]
    assert sorted(all_once) == list(range(len(lengths)))
    assert in_order([500], 128) == [[0]]
    assert next(batch_order(lengths, 128, seed=4)) != next(batch_order(lengths, 128, seed=3))
