"""Counter-based noise: what a random draw is, as a pure function of where it is drawn.

Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). The key is the
request's seed; the counter holds vocabulary index, position, stream and choice. There is no state:
a draw does not depend on batch, step, graph or how often it is repeated, and drafting cannot move
the target's stream. This is the definition; `kernels/noise.h` has it for the captured step.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

# Streams: a word of the counter of their own, so that no two of them ever share a draw.
TARGET: Final = 0
DRAFT: Final = 1 << 30
ACCEPTANCE: Final = 2 << 30
RESIDUAL: Final = 3 << 30

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)

Words = npt.NDArray[np.uint64]  # values below 2^32


def philox(counter: tuple[Words, Words, Words, Words], seed: int) -> Words:
    """Random words `[..., 4]` below 2^32 of counters, four words `[...]` below 2^32 each.

    Args:
        seed: in [0, 2^64), the key.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(_ROUNDS):
        first, second = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (second >> _SHIFT) ^ c1 ^ np.uint64(k0),
            second & _LOW,
            (first >> _SHIFT) ^ c3 ^ np.uint64(k1),
            first & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1)


def uniforms(
    seed: int, *, position: int, stream: int, choice: int = 0, count: int = 1
) -> npt.NDArray[np.float64]:
    """Uniform numbers `[count]` in (0, 1), never 0 or 1: the draws of vocabulary indices 0.. there.

    Args:
        seed: of the request, in [0, 2^64).
        position: index of the token that is drawn, prompt included.
        stream: TARGET, DRAFT, ACCEPTANCE or RESIDUAL.
        choice: which of a request's n answers.
    """
    blocks = np.arange(-(-count // 4), dtype=np.uint64)
    rest = [np.full_like(blocks, value) for value in (position, stream, choice)]
    words = philox((blocks, rest[0], rest[1], rest[2]), seed).reshape(-1)[:count]
    return (words.astype(np.float64) + 0.5) * 2.0**-32


def gumbels(
    seed: int, *, position: int, stream: int, choice: int = 0, count: int
) -> npt.NDArray[np.float64]:
    """Standard Gumbel numbers `[count]`, `-log(-log(1 - u))` of the uniforms of the same place.

    Written with 1 - u, so that the largest numbers, which decide, come from the smallest uniforms
    and are the most finely spaced.
    """
    u = uniforms(seed, position=position, stream=stream, choice=choice, count=count)
    return -np.log(-np.log1p(-u))
