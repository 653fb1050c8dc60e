"""row_logprobs: of the chosen token, with its rank, and of the likeliest ones.

Each chunk of a row leaves its likeliest tokens, its weight relative to its own largest number, and
how many are likelier than the chosen one. One program a row joins them, always in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.sampling.params import MAX_LOGPROBS
from graphengine.triton_kernels.chunks import (
    NONE,
    ONE,
    OPTIONS,
    as_integer,
    best_number,
    check_contiguous,
    constants,
    lanes_of,
    load_left,
    num_chunks,
    spec,
    weight,
)
from graphengine.triton_kernels.specs import KernelSpec

Tensor = torch.Tensor

_JOIN_OPTIONS = OPTIONS | {"num_warps": 4}


def row_logprobs(
    ids: Tensor, values: Tensor, ranks: Tensor, logits: Tensor, target_ids: Tensor
) -> None:
    """Write `ids` int32 and `values` fp32 [T, width] and `ranks` [T] int32 of `logits` [T, vocab].

    Column 0 is the row's token in `target_ids` [T] int32; those behind it are the likeliest, best
    first and equal ones by lowest id, -1 and -inf beyond what can come. The rank of a token is how
    many are likelier, plus 1. NaN counts as nothing.
    """
    check_contiguous(ids, values, ranks, logits, target_ids)
    (rows, vocab), width = logits.shape, ids.shape[1]
    shape = (rows, num_chunks(vocab))

    def left(dtype: torch.dtype, *more: int) -> Tensor:
        return torch.empty(*shape, *more, dtype=dtype, device=logits.device)

    most = max(width - 1, 1)
    best = (left(torch.float32, most), left(torch.int32, most))
    others = (left(torch.int64), left(torch.int32))
    _chunk_best[shape](*best, *others, logits, target_ids, **constants(vocab), MOST=most, **OPTIONS)
    _join_best[(rows,)](
        ids,
        values,
        ranks,
        *best,
        *others,
        logits,
        target_ids,
        **_join_constants(vocab, width),
        **_JOIN_OPTIONS,
    )


def _join_constants(vocab: int, width: int) -> dict[str, int]:
    most = max(width - 1, 1)
    found = num_chunks(vocab) * most
    joined = constants(vocab, joins=True)
    return joined | {"MOST": most, "WIDTH": width, "FOUND": triton.next_power_of_2(found)}


@triton.jit
def _chunk_best(
    numbers,
    tokens,
    sums,
    likelier,
    logits,
    target_ids,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    MOST: tl.constexpr,
):
    """The MOST likeliest tokens of one chunk of a row, best first; NONE and VOCAB beyond."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    lanes, inside = lanes_of(chunk, VOCAB, CHUNK)
    x_row = logits + row.to(tl.int64) * VOCAB
    x = tl.load(x_row + lanes, mask=inside, other=NONE)
    chosen = tl.load(x_row + tl.load(target_ids + row))
    left: tl.constexpr = (VOCAB + CHUNK - 1) // CHUNK
    at = row * left + chunk
    tl.store(likelier + at, tl.sum((x > chosen).to(tl.int32), 0))
    largest = tl.max(tl.where(x == x, x, NONE), 0)
    weights = tl.where(x > NONE, weight(x - largest), 0.0)  # of NaN too
    tl.store(sums + at, tl.sum(as_integer(weights), 0))
    x = tl.where(x > NONE, x, NONE)
    for place in range(MOST):
        number, token = best_number(x, lanes, inside & (x > NONE), VOCAB)
        tl.store(numbers + at * MOST + place, number)
        tl.store(tokens + at * MOST + place, token)
        x = tl.where(lanes == token, NONE, x)


@triton.jit
def _join_best(
    ids,
    values,
    ranks,
    numbers,
    tokens,
    sums,
    likelier,
    logits,
    target_ids,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    PADDED: tl.constexpr,
    MOST: tl.constexpr,
    WIDTH: tl.constexpr,
    FOUND: tl.constexpr,
):
    """One row's columns. Row invariant: every row's sums are added in the same tree."""
    row = tl.program_id(0)
    left: tl.constexpr = (VOCAB + CHUNK - 1) // CHUNK
    chosen = tl.load(target_ids + row)
    tl.store(ranks + row, tl.sum(load_left(likelier, row, 0, left, PADDED), 0) + 1)
    chunks = tl.arange(0, PADDED)
    peaks = tl.load(numbers + (row * left + chunks) * MOST, mask=chunks < left, other=NONE).to(
        tl.float64
    )
    largest = tl.max(peaks, 0)
    parts = load_left(sums, row, 0, left, PADDED).to(tl.float64) / ONE
    total = tl.sum(tl.where(peaks > NONE, parts * tl.exp(peaks - largest), 0.0), 0)
    norm = largest + tl.log(total)
    out = ids + row.to(tl.int64) * WIDTH
    out_values = values + row.to(tl.int64) * WIDTH
    x = tl.load(logits + row.to(tl.int64) * VOCAB + chosen).to(tl.float64)
    tl.store(out, chosen)
    tl.store(out_values, (x - norm).to(tl.float32))
    found = tl.arange(0, FOUND)
    base = row * left * MOST
    number = tl.load(numbers + base + found, mask=found < left * MOST, other=NONE)
    token = tl.load(tokens + base + found, mask=found < left * MOST, other=VOCAB)
    for place in range(1, WIDTH):
        best, one = best_number(number, token, number > NONE, VOCAB)
        tl.store(out + place, tl.where(one < VOCAB, one, -1))
        value = (best.to(tl.float64) - norm).to(tl.float32)
        tl.store(out_values + place, tl.where(one < VOCAB, value, NONE))
        number = tl.where(token == one, NONE, number)


def _specs(vocab: int) -> list[KernelSpec]:
    floats = dict.fromkeys(("numbers", "values", "logits"), "*fp32")
    types = floats | {"sums": "*i64"}
    width = MAX_LOGPROBS + 1
    plain, joined = constants(vocab), _join_constants(vocab, width)
    return [
        spec(f"chunk best {vocab}", _chunk_best, plain | {"MOST": width - 1}, types),
        spec(f"join best {vocab}", _join_best, joined, types, _JOIN_OPTIONS),
    ]


COMPILED: tuple[KernelSpec, ...] = (*_specs(49_152), *_specs(151_936))
