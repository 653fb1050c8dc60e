"""Where top-k and top-p end in a scaled row, found without sorting it.

A survey counts and weighs, chunk by chunk, what lies above each of some fixed numbers. The tokens
down to the first of these that is far enough are gathered in their order, and one program a row
searches them by bisection over keys, the bits of the numbers; in a row with too many of them it
searches the whole row. All sums are of integers: which way was taken cannot be told from the cut.
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
ROOM = 8192  # tokens that are gathered of a row at most
# The numbers of the survey, by key: from -0.5 to -32, below which integer weights are 0.
STEPS = tl.constexpr(16)
FIRST_KEY = tl.constexpr(0x3F000000)
KEY_STEP = tl.constexpr(0x333333)
_OPTIONS = OPTIONS | {"num_warps": 16}


def find_cuts(
    cuts: Tensor,
    scaled: Tensor,
    peaks: Tensor,
    query_len: Tensor,
    state_rows: Tensor,
    settings: Tensor,
) -> None:
    """Write `cuts` [T, 2] int32: the key of the last number that stays, and of the tokens with that
    number the last one; NO_KEY where neither top-k nor top-p cut anything, or LEAVE.

    Args:
        scaled: [T, vocab] fp32.
        peaks: [T, chunks] fp32, each chunk's largest number before it was scaled.
    """
    (rows, vocab), grid = scaled.shape, peaks.shape
    device, block = scaled.device, (query_len, state_rows, settings)
    counts = torch.empty(*grid, STEPS.value, dtype=torch.int32, device=device)
    sums = torch.empty(*grid, STEPS.value, dtype=torch.int64, device=device)
    numbers = torch.empty(rows, ROOM, dtype=torch.float32, device=device)
    tokens = torch.empty(rows, ROOM, dtype=torch.int32, device=device)
    survey, gathered, joined = (counts, sums), (numbers, tokens), constants(vocab, joins=True)
    _survey[grid](*survey, scaled, *block, **constants(vocab), **OPTIONS)
    _gather[grid](*gathered, *survey, scaled, *block, **joined, ROOM=ROOM, **OPTIONS)
    _find_cuts[(rows,)](
        cuts, *gathered, *survey, scaled, peaks, *block, **joined, ROOM=ROOM, **_OPTIONS
    )


@triton.jit
def _asked(row, query_len, state_rows, settings, VOCAB: tl.constexpr):
    """A row's temperature, top-k (0: off, or greedy) and top-p (1: off, or greedy)."""
    entry = settings + tl.load(state_rows + row // tl.load(query_len)) * WORDS
    temperature, top_p = real(entry, TEMPERATURE), real(entry, TOP_P)
    top_k = tl.load(entry + TOP_K)
    is_on = temperature != 0.0
    top_k = tl.where(is_on & (top_k > 0) & (top_k < VOCAB), top_k, 0)
    return temperature, top_k, tl.where(is_on & (top_p < 1.0), top_p, 1.0)


@triton.jit
def _survey(
    counts,
    sums,
    scaled,
    query_len,
    state_rows,
    settings,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """How many tokens of one chunk of a row reach each step, and what they weigh."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    _, top_k, top_p = _asked(row, query_len, state_rows, settings, VOCAB)
    if (top_k == 0) & (top_p == 1.0):
        return
    lanes, inside = lanes_of(chunk, VOCAB, CHUNK)
    y = tl.load(scaled + row.to(tl.int64) * VOCAB + lanes, mask=inside, other=NONE)
    key, weights = key_of(y), as_integer(weight(y))
    chunks: tl.constexpr = (VOCAB + CHUNK - 1) // CHUNK
    for step in range(STEPS):
        reached = key <= step * KEY_STEP + FIRST_KEY
        at = (row * chunks + chunk) * STEPS + step
        tl.store(counts + at, tl.sum(reached.to(tl.int32), 0))
        tl.store(sums + at, tl.sum(tl.where(reached, weights, 0), 0))


@triton.jit
def _reach(counts, sums, row, top_k, top_p, COUNT: tl.constexpr, PADDED: tl.constexpr):
    """The first step down to which there is all that top-k, else top-p, keeps (STEPS: none), how
    many tokens that is, and what the whole row weighs."""
    chunks, steps = tl.arange(0, PADDED), tl.arange(0, STEPS)
    at = (row * COUNT + chunks[:, None]) * STEPS + steps[None, :]
    known = chunks[:, None] < COUNT
    count = tl.sum(tl.load(counts + at, mask=known, other=0), 0)
    weights = tl.sum(tl.load(sums + at, mask=known, other=0), 0)
    total = tl.max(weights, 0)
    is_enough = tl.where(top_k > 0, count >= top_k, weights >= _target(top_p, total))
    step = tl.min(tl.where(is_enough, steps, STEPS), 0)
    return step, tl.sum(tl.where(steps == step, count, 0), 0), total


@triton.jit
def _target(top_p, total):
    """The weight that top-p keeps at least, of a whole."""
    part = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    return tl.maximum(part, 1)


@triton.jit
def _gather(
    numbers,
    tokens,
    counts,
    sums,
    scaled,
    query_len,
    state_rows,
    settings,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    PADDED: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Put the tokens of one chunk that matter behind those of the chunks before it."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    _, top_k, top_p = _asked(row, query_len, state_rows, settings, VOCAB)
    if (top_k == 0) & (top_p == 1.0):
        return
    chunks: tl.constexpr = (VOCAB + CHUNK - 1) // CHUNK
    step, count, _ = _reach(counts, sums, row, top_k, top_p, chunks, PADDED)
    if (step == STEPS) | (count > ROOM):
        return
    others = tl.arange(0, PADDED)
    at = (row * chunks + others) * STEPS + step
    first = tl.sum(tl.load(counts + at, mask=others < chunk, other=0), 0)
    lanes, inside = lanes_of(chunk, VOCAB, CHUNK)
    y = tl.load(scaled + row.to(tl.int64) * VOCAB + lanes, mask=inside, other=NONE)
    reached = key_of(y) <= step * KEY_STEP + FIRST_KEY
    place = row * ROOM + first + tl.cumsum(reached.to(tl.int32), 0) - 1
    tl.store(numbers + place, y, mask=reached)
    tl.store(tokens + place, lanes, mask=reached)


@triton.jit
def _find_cuts(
    cuts,
    numbers,
    tokens,
    counts,
    sums,
    scaled,
    peaks,
    query_len,
    state_rows,
    settings,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    PADDED: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Both cuts of one row. Row invariant: it reads no other, and adds integers."""
    row = tl.program_id(0)
    chunks: tl.constexpr = (VOCAB + CHUNK - 1) // CHUNK
    temperature, top_k, top_p = _asked(row, query_len, state_rows, settings, VOCAB)
    last = tl.full((), NO_KEY, tl.int32)
    last_tie = tl.full((), VOCAB, tl.int32)
    largest = tl.max(load_left(peaks, row, NONE, chunks, PADDED), 0)
    if (temperature == 0.0) | (largest == NONE):
        last = tl.full((), LEAVE, tl.int32)
    elif (top_k > 0) | (top_p < 1.0):
        step, gathered, total = _reach(counts, sums, row, top_k, top_p, chunks, PADDED)
        is_gathered = (step < STEPS) & (gathered <= ROOM)
        y, count = scaled + row.to(tl.int64) * VOCAB, tl.full((), VOCAB, tl.int32)
        if is_gathered:
            y, count = numbers + row.to(tl.int64) * ROOM, gathered
        if top_k > 0:
            last, _ = _find(y, count, top_k.to(tl.int64), last, CHUNK, False)
            total, _, _ = _add_up(y, count, 0, last, last, CHUNK, True)
        if top_p < 1.0:
            target = _target(top_p, total)
            last, before = _find(y, count, target, last, CHUNK, True)
            number = (last | -2147483648).to(tl.float32, bitcast=True)
            one = as_integer(weight(number))
            num_ties = ((target - before + one - 1) // one).to(tl.int32)
            last_tie = _nth_tie(y, count, last, num_ties, CHUNK)
            if is_gathered:
                last_tie = tl.load(tokens + row * ROOM + last_tie)
    tl.store(cuts + 2 * row, last)
    tl.store(cuts + 2 * row + 1, last_tie)


@triton.jit
def _find(y, count, target, high, CHUNK: tl.constexpr, WEIGHTS: tl.constexpr):
    """The key, at most `high`, up to which (that included) there is `target`, and what lies before
    it; NO_KEY where there is less in all. An end moves to the nearest number that there is."""
    low = tl.full((), 0, tl.int32)
    high = tl.minimum(high, NO_KEY - 1)
    before = tl.full((), 0, tl.int64)
    while (
        low < high
    ):  # the key that is sought lies in [low, high]; what lies before low is added up
        middle = low + (high - low) // 2
        part, nearest, next_one = _add_up(y, count, low, middle, high, CHUNK, WEIGHTS)
        if before + part >= target:
            high = nearest
        else:
            before += part
            low = next_one
    return low, before


@triton.jit
def _add_up(y, count, low, middle, high, CHUNK: tl.constexpr, WEIGHTS: tl.constexpr):
    """Of the numbers with keys in [low, high]: the sum of those up to the middle, the last key of
    these and the first beyond them (NO_KEY where there is none)."""
    part = tl.zeros((CHUNK,), tl.int64)
    nearest = tl.zeros((CHUNK,), tl.int32)
    next_one = tl.full((CHUNK,), NO_KEY, tl.int32)
    for first in range(0, count, CHUNK):
        lanes = first + tl.arange(0, CHUNK)
        number = tl.load(y + lanes, mask=lanes < count, other=NONE)
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
def _nth_tie(y, count, key, n, CHUNK: tl.constexpr):
    """Where the n-th of the numbers with this key lies; there are as many."""
    found = tl.full((), 0, tl.int32)
    for first in range(0, count, CHUNK):
        if n > 0:
            lanes = first + tl.arange(0, CHUNK)
            number = tl.load(y + lanes, mask=lanes < count, other=NONE)
            ties = (key_of(number) == key).to(tl.int32)
            here = tl.sum(ties, 0)
            if here >= n:
                rank = tl.cumsum(ties, 0)
                found = tl.max(tl.where((ties > 0) & (rank == n), lanes, 0), 0)
            n -= here
    return found


def _specs(vocab: int) -> list[KernelSpec]:
    types = dict.fromkeys(("numbers", "scaled", "peaks"), "*fp32") | {"sums": "*i64"}
    joined = constants(vocab, joins=True) | {"ROOM": ROOM}
    return [
        spec(f"survey {vocab}", _survey, constants(vocab), types),
        spec(f"gather {vocab}", _gather, joined, types),
        spec(f"find cuts {vocab}", _find_cuts, joined, types, _OPTIONS),
    ]


COMPILED: tuple[KernelSpec, ...] = (*_specs(49_152), *_specs(151_936))
