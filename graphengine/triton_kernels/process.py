"""process_logits: a request's processors on every row, as `sampling/reference.py` says.

Bias, penalties and masks; temperature; the search for the numbers where top-k and top-p end, which
is `search.py`; the cut there. A row that a kernel has nothing to do for leaves it at once.
Rows are independent, and what chunks add up are integers: see `chunks.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.sampling.params import MAX_LOGIT_BIAS
from graphengine.sampling.settings import MASK, PENALTIES
from graphengine.triton_kernels.chunks import (
    NO_KEY,
    NONE,
    OPTIONS,
    TEMPERATURE,
    WORDS,
    check_contiguous,
    constants,
    key_of,
    lanes_of,
    load_left,
    num_chunks,
    real,
    scaled,
    spec,
    word_of,
)
from graphengine.triton_kernels.search import LEAVE, MIN_P, find_cuts
from graphengine.triton_kernels.specs import KernelSpec

Tensor = torch.Tensor

REPETITION = word_of("repetition_penalty")
FREQUENCY = word_of("frequency_penalty")
PRESENCE = word_of("presence_penalty")
FLAGS = word_of("flags")
NUM_BIAS = word_of("num_bias")
HAS_PENALTIES = tl.constexpr(PENALTIES)
HAS_MASK = tl.constexpr(MASK)


def process_logits(
    out: Tensor,
    logits: Tensor,
    token_ids: Tensor,
    query_len: Tensor,
    state_rows: Tensor,
    mask: Tensor,
    *tables: Tensor,
) -> None:
    """Write processed logits `out` [T, vocab] fp32 of `logits` [T, vocab] fp32.

    Args:
        token_ids: [T] int32, a request's rows in turn; row j sees the drafts 1..j.
        query_len: [1] int32, rows of each request.
        state_rows: [num_reqs] int32 at least, rows of the tables.
        mask: [T, ceil(vocab / 32)] int32, see `masks.py`.
        tables: settings, counts, in_prompt, bias_ids and bias_values of `SamplerState`.

    Raises:
        ValueError: the vocabulary is larger than the kernels take.
    """
    check_contiguous(out, logits, token_ids, query_len, state_rows, mask, *tables)
    settings, counts, in_prompt, bias_ids, bias_values = tables
    rows, vocab = out.shape
    chunks = num_chunks(vocab)
    peaks = torch.empty(rows, chunks, dtype=torch.float32, device=out.device)
    cuts = torch.empty(rows, 2, dtype=torch.int32, device=out.device)
    block = (query_len, state_rows, settings)
    _adjust[(rows, chunks)](
        out,
        peaks,
        logits,
        token_ids,
        *block,
        counts,
        in_prompt,
        bias_ids,
        bias_values,
        mask,
        **constants(vocab),
        MAX_BIAS=bias_ids.shape[1],
        **OPTIONS,
    )
    _scale[(rows, chunks)](out, peaks, *block, **constants(vocab, joins=True), **OPTIONS)
    find_cuts(cuts, out, peaks, *block)
    _cut[(rows, chunks)](out, cuts, *block, **constants(vocab), **OPTIONS)


@triton.jit
def _adjust(
    out,
    peaks,
    logits,
    token_ids,
    query_len,
    state_rows,
    settings,
    counts,
    in_prompt,
    bias_ids,
    bias_values,
    mask,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_BIAS: tl.constexpr,
):
    """Bias, penalties and mask of one chunk of a row; leaves its largest number in `peaks`."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    length = tl.load(query_len)
    request, offset = row // length, row % length
    state = tl.load(state_rows + request)
    flags = tl.load(settings + state * WORDS + FLAGS)
    lanes, inside = lanes_of(chunk, VOCAB, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * VOCAB + lanes, mask=inside, other=NONE)
    for i in range(tl.load(settings + state * WORDS + NUM_BIAS)):
        token = tl.load(bias_ids + state * MAX_BIAS + i)
        if token // CHUNK == chunk:
            x = tl.where(lanes == token, x + tl.load(bias_values + state * MAX_BIAS + i), x)
    if flags & HAS_PENALTIES:
        table = state.to(tl.int64) * VOCAB
        count = tl.load(counts + table + lanes, mask=inside, other=0)
        prompted = tl.load(in_prompt + table + lanes, mask=inside, other=0) != 0
        for draft in range(offset):
            token = tl.load(token_ids + request * length + 1 + draft)
            count += (lanes == token).to(tl.int32)
        x = _penalised(x, count, prompted, settings, state)
    if flags & HAS_MASK:
        words: tl.constexpr = (VOCAB + 31) // 32
        word = tl.load(mask + row.to(tl.int64) * words + lanes // 32, mask=inside, other=0)
        x = tl.where((word >> (lanes % 32)) & 1 != 0, x, NONE)
    tl.store(out + row.to(tl.int64) * VOCAB + lanes, x, mask=inside)
    chunks: tl.constexpr = (VOCAB + CHUNK - 1) // CHUNK
    largest = tl.max(tl.where(inside & (x == x), x, NONE), 0)
    tl.store(peaks + row * chunks + chunk, largest)


@triton.jit
def _penalised(x, count, prompted, settings, state):
    """Repetition, frequency and presence penalty, in fp32 and each rounded by itself."""
    repetition = real(settings + state * WORDS, REPETITION)
    repeated = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
    x = tl.where((count > 0) | prompted, repeated, x)
    x = x - count.to(tl.float32) * real(settings + state * WORDS, FREQUENCY)
    return x - tl.where(count > 0, real(settings + state * WORDS, PRESENCE), 0.0)


@triton.jit
def _scale(
    out,
    peaks,
    query_len,
    state_rows,
    settings,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Temperature on one chunk of a row."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    state = tl.load(state_rows + row // tl.load(query_len))
    temperature = real(settings + state * WORDS, TEMPERATURE)
    chunks: tl.constexpr = (VOCAB + CHUNK - 1) // CHUNK
    largest = tl.max(load_left(peaks, row, NONE, chunks, PADDED), 0)
    if (temperature == 0.0) | (largest == NONE):  # greedy, or nothing to choose from
        return
    lanes, inside = lanes_of(chunk, VOCAB, CHUNK)
    at = out + row.to(tl.int64) * VOCAB + lanes
    y = scaled(tl.load(at, mask=inside, other=NONE), largest, temperature)
    tl.store(at, y, mask=inside)


@triton.jit
def _cut(out, cuts, query_len, state_rows, settings, VOCAB: tl.constexpr, CHUNK: tl.constexpr):
    """What top-k, top-p and min-p leave of one chunk of a row."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    state = tl.load(state_rows + row // tl.load(query_len))
    last, last_tie = tl.load(cuts + 2 * row), tl.load(cuts + 2 * row + 1)
    min_p = real(settings + state * WORDS, MIN_P)
    if (last == LEAVE) | ((last == NO_KEY) & (min_p == 0.0)):
        return
    lanes, inside = lanes_of(chunk, VOCAB, CHUNK)
    at = out + row.to(tl.int64) * VOCAB + lanes
    y = tl.load(at, mask=inside, other=NONE)
    key = key_of(y)
    kept = (key < last) | ((key == last) & (lanes <= last_tie))
    if min_p > 0.0:
        kept &= y >= tl.log(min_p.to(tl.float64)).to(tl.float32)
    tl.store(at, tl.where(kept, y, NONE), mask=inside)


def _specs(vocab: int) -> list[KernelSpec]:
    floats = dict.fromkeys(("out", "peaks", "logits", "bias_values"), "*fp32")
    types = floats | {"in_prompt": "*u8"}
    plain, joined = constants(vocab), constants(vocab, joins=True)
    return [
        spec(f"adjust {vocab}", _adjust, plain | {"MAX_BIAS": MAX_LOGIT_BIAS}, types),
        spec(f"scale {vocab}", _scale, joined, types),
        spec(f"cut {vocab}", _cut, plain, types),
    ]


COMPILED: tuple[KernelSpec, ...] = (*_specs(49_152), *_specs(151_936))
