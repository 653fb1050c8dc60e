"""Bit masks over the vocabulary, as the captured sampler reads them: bit set, token allowed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import numpy as np
import numpy.typing as npt

MASK_BITS: Final = 32  # of a word
Masks = npt.NDArray[np.int32]


def mask_words(vocab_size: int) -> int:
    """Words of a row's mask."""
    return -(-vocab_size // MASK_BITS)


def mask_of(token_ids: Collection[int] | npt.NDArray[Any] | None, vocab_size: int) -> Masks:
    """Bits `[words]` of these ids, of all where None; ids beyond the vocabulary are left out."""
    bits = np.full(mask_words(vocab_size) * MASK_BITS, token_ids is None)
    if token_ids is not None:
        ids = np.fromiter(token_ids, dtype=np.intp, count=len(token_ids))
        bits[ids[ids < vocab_size]] = True
    return np.packbits(bits, bitorder="little").view(np.int32)
