"""Rows of logits in chunks: what the kernels that read a vocabulary share.

A row is cut into chunks of CHUNK tokens, a program each, so that few rows fill a GPU. What chunks
hand on is joined without rounding: a maximum, a count, or a sum of weights, which are integers. So
neither the chunks' size nor who adds first can change a bit, and rows never meet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
import triton
import triton.language as tl

from graphengine.sampling.settings import DTYPE
from graphengine.triton_kernels.specs import KernelSpec

Tensor = torch.Tensor

CHUNK: Final = 4096
# Products and sums are contracted nowhere: a number has the same bits in every kernel.
OPTIONS: Final = {"num_warps": 8, "enable_fp_fusion": False}
MAX_VOCAB: Final = 1 << 18  # so many weights of 1, as integers, fit 63 bits
ONE = tl.constexpr(float(1 << 44))
NONE = tl.constexpr(float("-inf"))
NO_KEY = tl.constexpr(0x7F800000)  # the key of -inf, the largest


def word_of(name: str) -> tl.constexpr:
    """Where a field of a request's settings lies in its row of words."""
    assert DTYPE.fields is not None
    return tl.constexpr(DTYPE.fields[name][1] // 4)


WORDS = tl.constexpr(DTYPE.itemsize // 4)
TEMPERATURE = word_of("temperature")
SEED = word_of("seed")  # two words; the next is choice


def chunk_size(vocab: int) -> int:
    """Tokens of a chunk; ValueError for a vocabulary whose weights might not fit."""
    if not 1 <= vocab <= MAX_VOCAB:
        raise ValueError(f"vocabulary of {vocab} tokens: the kernels take 1 to {MAX_VOCAB}")
    return min(CHUNK, max(1 << (vocab - 1).bit_length(), 16))


def num_chunks(vocab: int) -> int:
    return -(-vocab // chunk_size(vocab))


def constants(vocab: int, *, joins: bool = False) -> dict[str, int]:
    """Constexprs of a kernel over rows of `vocab` numbers.

    Args:
        joins: it reads what all chunks of a row have left.
    """
    found = {"VOCAB": vocab, "CHUNK": chunk_size(vocab)}
    return found | {"PADDED": triton.next_power_of_2(num_chunks(vocab))} if joins else found


def check_contiguous(*tensors: Tensor | None) -> None:
    for tensor in tensors:
        assert tensor is None or tensor.is_contiguous(), "kernels take contiguous tensors"


def spec(
    name: str,
    kernel: Any,
    constants: Mapping[str, object],
    types: Mapping[str, str],
    options: Mapping[str, int] = OPTIONS,
) -> KernelSpec:
    """A kernel's specification; `types` are those of its arguments that are not "*i32"."""
    arguments = [argument for argument in kernel.arg_names if argument not in constants]
    signature = {argument: types.get(argument, "*i32") for argument in arguments}
    return KernelSpec(name, kernel, signature, constants, options)


@triton.jit
def lanes_of(chunk, VOCAB: tl.constexpr, CHUNK: tl.constexpr):
    """Vocabulary indices of a chunk [CHUNK], and which of them there are."""
    lanes = chunk * CHUNK + tl.arange(0, CHUNK)
    return lanes, lanes < VOCAB


@triton.jit
def load_left(left, row, NOTHING, COUNT: tl.constexpr, PADDED: tl.constexpr):
    """What the chunks of a row have left in `left` [T, COUNT], NOTHING beyond: [PADDED]."""
    chunks = tl.arange(0, PADDED)
    return tl.load(left + row.to(tl.int64) * COUNT + chunks, mask=chunks < COUNT, other=NOTHING)


@triton.jit
def real(entry, WORD: tl.constexpr):
    """A float of a row of words that describe a request."""
    return tl.load(entry + WORD).to(tl.float32, bitcast=True)


@triton.jit
def scaled(x, largest, temperature):
    """(x - largest) / temperature in fp32, so that the largest is 0; NaN becomes -inf."""
    y = tl.div_rn(x - largest, temperature)
    y = tl.where(largest == float("inf"), tl.where(x == largest, 0.0, NONE), y)
    return tl.where(y <= 0.0, y, NONE)


@triton.jit
def key_of(y):
    """A scaled number's magnitude as an integer: ascending as numbers descend from 0 to -inf."""
    return y.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def weight(y):
    """exp(y) of scaled numbers in fp32, to about two units of the last place; 0 below -87."""
    whole = y * 1.4426950408889634  # log2(e), then what fp32 cuts off it
    part = tl.fma(y, tl.full(y.shape, 1.4426950408889634, tl.float32), -whole) + y * 1.925963e-08
    return tl.where(y > -87.0, tl.exp2(whole) * (1.0 + part * 0.6931471805599453), 0.0)


@triton.jit
def as_integer(w):
    """A weight in [0, 1] as an integer, so that sums do not depend on their order."""
    return (w * ONE).to(tl.int64)


@triton.jit
def best_number(x, lanes, inside, NOBODY: tl.constexpr):
    """The largest number and its lane, lowest on ties; NaN is none. -inf and the first number where
    nothing is larger, NOBODY where there is no number."""
    there = inside & (x == x)
    value = tl.max(tl.where(there, x, NONE), 0)
    return value, tl.min(tl.where(there & (x == value), lanes, NOBODY), 0)
