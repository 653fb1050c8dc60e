"""Counter-based noise on the GPU: `sampling/noise.py` as functions that kernels call.

The random words are the same bits, uniforms and Gumbel numbers the same float64 numbers but for the
last place of a logarithm. Float64 is slow on most GPUs, so every token gets a rough fp32 number
first and only those within reach of the largest get theirs exactly: seldom more than one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphengine.sampling import noise

TARGET = tl.constexpr(noise.TARGET)
DRAFT = tl.constexpr(noise.DRAFT)
ACCEPTANCE = tl.constexpr(noise.ACCEPTANCE)
RESIDUAL = tl.constexpr(noise.RESIDUAL)
# A rough number is nearer to the exact one than half of this (here by about 2e-5).
SLACK = tl.constexpr(1e-3)
# Below the likeliest token's number of a scaled row, which is 0, by more than noise can make up
# for: Gumbel numbers lie between -3.14 and 22.88.
HOPELESS = tl.constexpr(-64.0)
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def as_word(x):
    """32 bits, or a number below 2^32, as an unsigned word."""
    if x.dtype == tl.int32:
        word = x.to(tl.uint32, bitcast=True)
    else:
        word = x.to(tl.uint32)
    return word


@triton.jit
def place_of(settings, position, STREAM: tl.constexpr):
    """Words of the counter and the key that all tokens of a place share: position, stream, choice,
    seed. `settings` points to three words: the seed's low and high, choice."""
    seed_low, seed_high = as_word(tl.load(settings)), as_word(tl.load(settings + 1))
    choice = as_word(tl.load(settings + 2))
    return as_word(position), tl.full((), STREAM, tl.uint32), choice, seed_low, seed_high


@triton.jit
def philox(block, place):
    """Four words of each block [N] of four vocabulary indices (Philox 4x32-10)."""
    position, stream, choice, k0, k1 = place
    c0 = block.to(tl.uint32)
    c1, c2, c3 = c0 * 0 + position, c0 * 0 + stream, c0 * 0 + choice
    first = tl.full((), 0xD2511F53, tl.uint32)
    second = tl.full((), 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        high, low = tl.umulhi(second, c2), second * c2
        c2, c3 = tl.umulhi(first, c0) ^ c3 ^ k1, first * c0
        c0, c1 = high ^ c1 ^ k0, low
        k0 += tl.full((), 0x9E3779B9, tl.uint32)
        k1 += tl.full((), 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def words_from(first, place, COUNT: tl.constexpr):
    """Random words [COUNT] of the vocabulary indices from `first`, a multiple of 4, on."""
    w0, w1, w2, w3 = philox(first // 4 + tl.arange(0, COUNT // 4), place)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (COUNT,))


@triton.jit
def words_of(index, place):
    """Random words [N] of any vocabulary indices [N], each the same as `words_from` gives it."""
    w0, w1, w2, w3 = philox(index // 4, place)
    lower = tl.where(index % 2 == 0, w0, w1)
    upper = tl.where(index % 2 == 0, w2, w3)
    return tl.where(index % 4 < 2, lower, upper)


@triton.jit
def uniform(word):
    """In (0, 1), float64."""
    return (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2^-32


@triton.jit
def gumbel(word):
    """Standard Gumbel number, float64. 1 - u has 33 bits, so its logarithm loses nothing to it."""
    return -tl.log(-tl.log(1.0 - uniform(word)))


@triton.jit
def rough_gumbel(word):
    """The same in fp32, within SLACK / 2."""
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 1 - u
    small = u * (1.0 + u * (0.5 + u * 0.3333333))
    return -tl.log(tl.where(u < 0.015625, small, -tl.log(rest)))


@triton.jit
def noisy_best(numbers, words, lanes, live, NOBODY: tl.constexpr, LOG: tl.constexpr):
    """The largest number plus its Gumbel number, float64, and its lane; lowest lane on ties.

    Args:
        numbers: [N]; with LOG their logarithms are meant.
        words: [N], the random words of their tokens.
        lanes: [N] ascending int32.
        live: [N], who takes part; with LOG positive, else above HOPELESS, which none must be below
            who could win.

    Returns:
        -inf and NOBODY where none is live.
    """
    if LOG:
        base = numbers.to(tl.float32)
        live &= base > 0.0
        rough = tl.log(tl.where(live, base, 1.0)) + rough_gumbel(words)
    else:
        live &= numbers >= HOPELESS
        rough = numbers + rough_gumbel(words)
    rough = tl.where(live, rough, NOTHING)
    near = live & (rough >= tl.max(rough, 0) - SLACK)
    best = tl.full((), NOTHING, tl.float64)
    chosen = tl.full((), NOBODY, tl.int32)
    lane = tl.min(tl.where(near, lanes, NOBODY), 0)
    while lane < NOBODY:
        here = lanes == lane
        word = tl.sum(tl.where(here, words.to(tl.int64), 0), 0).to(tl.uint32)
        number = tl.sum(tl.where(here, numbers, 0.0), 0).to(tl.float64)
        value = (tl.log(number) if LOG else number) + gumbel(word)
        if value > best:
            best = value
            chosen = lane
        near &= lanes > lane
        lane = tl.min(tl.where(near, lanes, NOBODY), 0)
    return best, chosen
