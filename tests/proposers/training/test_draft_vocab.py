"""Which ids can be drafted, and the two tables of the format."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch

from proposers.training import Piece
from proposers.training.draft_vocab import choose_draft_vocab, d2t, t2d


def piece(ids: list[int], *, first: int = 0, held_out: bool = False) -> Piece:
    kind: Literal["text"] = "text"
    return Piece(np.array(ids, dtype=np.int32), first, kind, held_out)


def test_the_most_frequent_ids_that_are_trained_on() -> None:
    """Guards ids of prompts or held-out texts, a lost end of text, and ties that fall anyhow."""
    pieces = [
        piece([9, 9, 9, 5, 5, 5, 7, 7, 8, 8, 6]),
        piece([1, 1, 1, 1, 7], first=4),
        piece([2, 2, 2, 2, 2, 2], held_out=True),
    ]
    chosen = choose_draft_vocab(pieces, 4, vocab_size=12, always=[11])
    assert chosen.tolist() == [5, 7, 9, 11]  # 11 never occurs; 5, 7 and 9 three times each
    assert choose_draft_vocab(pieces, 3, vocab_size=12, always=[11]).tolist() == [5, 7, 11]


def test_tables_invert_each_other() -> None:
    """Guards absolute ids where the format has offsets."""
    ids = torch.tensor([0, 1, 4, 9, 10])
    assert d2t(ids).tolist() == [0, 0, 2, 6, 6]
    assert (torch.arange(5) + d2t(ids)).tolist() == ids.tolist()
    assert d2t(ids).dtype == torch.int64
    assert t2d(ids, 12).nonzero().flatten().tolist() == ids.tolist()
    assert t2d(ids, 12).dtype == torch.bool


@pytest.mark.parametrize("size", [1, 13])
def test_a_size_that_cannot_be_is_named(size: int) -> None:
    """Guards a vocabulary without an end of text, or one larger than the target's."""
    with pytest.raises(ValueError, match=f"draft_vocab={size}: expected 2 to 12"):
        choose_draft_vocab([piece([1])], size, vocab_size=12, always=[11])
