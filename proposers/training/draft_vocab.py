"""The draft vocabulary: the ids that a head can draft, and the two tables that say so.

EAGLE-3 (2503.01840) heads predict the target's most frequent tokens only. A table `d2t` of offsets
maps a draft id to the target's (target = draft + d2t[draft]), and `t2d` marks the ids that are in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from proposers.training.corpus import Piece

Tensor = torch.Tensor


def choose_draft_vocab(
    pieces: Iterable[Piece], size: int, *, vocab_size: int, always: Sequence[int]
) -> Tensor:
    """The most frequent ids of what is trained on, ties to the lowest id.

    Args:
        pieces: held-out ones and prompts do not count.
        size: how many ids.
        always: ids that are in whatever their count; those that end a text.

    Returns:
        int64 [size], ascending.

    Raises:
        ValueError: there is no such vocabulary.
    """
    check_draft_vocab(size, vocab_size=vocab_size, always=always)
    counts = np.zeros(vocab_size, dtype=np.int64)
    for piece in pieces:
        if not piece.held_out:
            counts += np.bincount(piece.token_ids[piece.first :], minlength=vocab_size)
    counts[list(always)] = counts.sum() + 1
    chosen = np.argsort(-counts, kind="stable")[:size]
    return torch.from_numpy(np.sort(chosen))


def check_draft_vocab(size: int, *, vocab_size: int, always: Sequence[int]) -> None:
    """Raises ValueError where there is no such vocabulary; arguments as above."""
    if not len(set(always)) < size <= vocab_size:
        raise ValueError(
            f"draft_vocab={size}: expected {len(set(always)) + 1} to {vocab_size} tokens, the "
            "target's vocabulary"
        )


def d2t(ids: Tensor) -> Tensor:
    """int64 [draft_vocab] offsets of ascending ids int64 [draft_vocab]."""
    return ids - torch.arange(len(ids))


def t2d(ids: Tensor, vocab_size: int) -> Tensor:
    """bool [vocab]: whether an id can be drafted."""
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[ids] = True
    return mask
