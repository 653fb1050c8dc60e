"""Where top-k and top-p end in a scaled row, found without sorting it.

Bisection over keys, the bits of the numbers: a pass adds up what lies between the two ends and the
middle (tokens for top-k, integer weights for top-p) and moves an end to the nearest number that
there is, so that about as many passes are needed as halvings of what is undecided. A chunk whose
largest number is below the lower end is not read.

One program a row: passes depend on each other, and a pass reads little after the first few.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.triton_kernels.chunks import (
    NO_KEY,
    NONE,
    OPTIONS,
    TEMPERATURE,
    WORDS,
    as_integer,
    constants,
    key_of,
    lanes_of,
    load_left,
    real,
    spec,
    weight,
    word_of,
)
from graphengine.triton_kernels.specs import KernelSpec

Tensor = torch.Tensor

TOP_P = word_of("top_p")
MIN_P = word_of("min_p")
TOP_K = word_of("top_k")
LEAVE = tl.constexpr(-1)  # a cut of rows that are greedy, or have nothing to choose from
_OPTIONS = OPTIONS | {"num_warps": 16}


def find_cuts(
    cuts: Tensor,
    scaled: Tensor,
    keys: Tensor,
    query_len: Tensor,
    state_rows: Tensor,
    settings: Tensor,
) -> None:
    """Write `cuts` [T, 2] int32: the key of the last number that stays, and of the tokens with that
    number the last one; NO_KEY where neither top-k nor top-p cut anything, or LEAVE.

    Args:
        scaled: [T, vocab] fp32.
        keys: [T, chunks] int32, of each chunk's largest number; undefined in greedy rows.
    """
    rows, vocab = scaled.shape
    _find_cuts[(rows,)](
        cuts,
        scaled,
        keys,
        query_len,
        state_rows,
        settings,
        **constants(vocab, joins=True),
        **_OPTIONS,
    )


@triton.jit
def _find_cuts(
    cuts,
    scaled,
    keys,
    query_len,
    state_rows,
    settings,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Both cuts of one row. Row invariant: it reads no other, and adds integers."""
    row = tl.program_id(0)
    state = tl.load(state_rows + row // tl.load(query_len))
    chunks: tl.constexpr = (VOCAB + CHUNK - 1) // CHUNK
    last = tl.full((), NO_KEY, tl.int32)
    last_tie = tl.full((), VOCAB, tl.int32)
    is_greedy = real(settings + state * WORDS, TEMPERATURE) == 0.0
    if is_greedy | (tl.min(load_left(keys, row, NO_KEY, chunks, PADDED), 0) == NO_KEY):
        last = tl.full((), LEAVE, tl.int32)
    else:
        y = scaled + row.to(tl.int64) * VOCAB
        own_keys = keys + row * chunks
        top_k = tl.load(settings + state * WORDS + TOP_K)
        if (top_k > 0) & (top_k < VOCAB):
            last, _ = _find(y, own_keys, top_k.to(tl.int64), last, VOCAB, CHUNK, False)
        top_p = real(settings + state * WORDS, TOP_P)
        if top_p < 1.0:
            total, _, _ = _add_up(y, own_keys, 0, last, last, VOCAB, CHUNK, True)
            target = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
            target = tl.maximum(target, 1)
            last, before = _find(y, own_keys, target, last, VOCAB, CHUNK, True)
            number = (last | -2147483648).to(tl.float32, bitcast=True)
            one = as_integer(weight(number))
            num_ties = ((target - before + one - 1) // one).to(tl.int32)
            last_tie = _nth_tie(y, own_keys, last, num_ties, VOCAB, CHUNK)
    tl.store(cuts + 2 * row, last)
    tl.store(cuts + 2 * row + 1, last_tie)


@triton.jit
def _find(y, keys, target, high, VOCAB: tl.constexpr, CHUNK: tl.constexpr, WEIGHTS: tl.constexpr):
    """The key, at most `high`, up to which (that included) there is `target`, and what lies before
    it; NO_KEY where there is less in all."""
    low = tl.full((), 0, tl.int32)
    high = tl.minimum(high, NO_KEY - 1)
    before = tl.full((), 0, tl.int64)
    while (
        low < high
    ):  # the key that is sought lies in [low, high]; what lies before low is added up
        middle = low + (high - low) // 2
        part, nearest, next_one = _add_up(y, keys, low, middle, high, VOCAB, CHUNK, WEIGHTS)
        if before + part >= target:
            high = nearest
        else:
            before += part
            low = next_one
    return low, before


@triton.jit
def _add_up(
    y,
    keys,
    low,
    middle,
    high,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    WEIGHTS: tl.constexpr,
):
    """Of the numbers with keys in [low, high]: the sum of those up to the middle, the last key of
    these and the first beyond them (NO_KEY where there is none)."""
    part = tl.zeros((CHUNK,), tl.int64)
    nearest = tl.zeros((CHUNK,), tl.int32)
    next_one = tl.full((CHUNK,), NO_KEY, tl.int32)
    for chunk in range((VOCAB + CHUNK - 1) // CHUNK):
        if tl.load(keys + chunk) <= high:
            lanes, inside = lanes_of(chunk, VOCAB, CHUNK)
            number = tl.load(y + lanes, mask=inside, other=NONE)
            key = key_of(number)
            among = (key >= low) & (key <= high) & (key < NO_KEY)
            lower = among & (key <= middle)
            if WEIGHTS:
                part += tl.where(lower, as_integer(weight(number)), 0)
            else:
                part += lower.to(tl.int64)
            nearest = tl.maximum(nearest, tl.where(lower, key, 0))
            next_one = tl.minimum(next_one, tl.where(among & (key > middle), key, NO_KEY))
    return tl.sum(part, 0), tl.max(nearest, 0), tl.min(next_one, 0)


@triton.jit
def _nth_tie(y, keys, key, n, VOCAB: tl.constexpr, CHUNK: tl.constexpr):
    """The n-th token, by id, whose number has this key."""
    found = tl.full((), VOCAB, tl.int32)
    for chunk in range((VOCAB + CHUNK - 1) // CHUNK):
        if (n > 0) & (tl.load(keys + chunk) <= key):
            lanes, inside = lanes_of(chunk, VOCAB, CHUNK)
            ties = (key_of(tl.load(y + lanes, mask=inside, other=NONE)) == key).to(tl.int32)
            here = tl.sum(ties, 0)
            if here >= n:
                rank = tl.cumsum(ties, 0)
                found = tl.min(tl.where((ties > 0) & (rank == n), lanes, VOCAB), 0)
            n -= here
    return found


COMPILED: tuple[KernelSpec, ...] = tuple(
    spec(
        f"find cuts {vocab}",
        _find_cuts,
        constants(vocab, joins=True),
        {"scaled": "*fp32"},
        _OPTIONS,
    )
    for vocab in (49_152, 151_936)
)
