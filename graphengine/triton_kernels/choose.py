"""choose_drafts: one draft of each request, as `proposers/drafting.py` defines it.

Coupled drafts are scaled and drawn by the functions that choose the target's token, so the same
logits give the same token. A draft's column may stand for another id of the target's vocabulary:
noise and probabilities are those of the id.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.triton_kernels.chunks import (
    NONE,
    OPTIONS,
    as_integer,
    best_number,
    check_contiguous,
    constants,
    lanes_of,
    num_chunks,
    real,
    scaled,
    spec,
    weight,
)
from graphengine.triton_kernels.noise import (
    DRAFT,
    TARGET,
    noisy_best,
    place_of,
    words_from,
    words_of,
)
from graphengine.triton_kernels.sample import empty_best, joined_best, total_weight
from graphengine.triton_kernels.specs import KernelSpec
from proposers.base import DraftSampling

Tensor = torch.Tensor

# A request's row of words, as `proposers/requests.py` has it: temperature, the seed's low and high,
# choice, and the position of the first draft.
WORDS = tl.constexpr(5)
TEMPERATURE = tl.constexpr(0)
SEED = tl.constexpr(1)
NUM_TOKENS = tl.constexpr(4)
_JOIN_OPTIONS = OPTIONS | {"num_warps": 1}


class ChooseDrafts:
    """A launcher; see `proposers.device.DraftOps.choose`, whose arguments it takes.

    `logits` are left as they are. Rows of `probs` may be counted together: [R * (k + 1), vocab].

    Args:
        sampling: how drafts are chosen.
    """

    def __init__(self, sampling: DraftSampling) -> None:
        self._sampling = sampling

    def __call__(
        self,
        chosen: Tensor,
        drafts: Tensor,
        probs: Tensor | None,
        logits: Tensor,
        tokens: Tensor | None,
        requests: Tensor,
        step: int,
    ) -> None:
        check_contiguous(chosen, drafts, probs, logits, tokens, requests)
        drawn = self._sampling == "probabilistic"
        assert not drawn or probs is not None, "probabilistic drafts hand over probabilities"
        probs = probs if drawn else None
        rows, vocab = logits.shape
        query_len = drafts.numel() // rows
        grid = (rows, num_chunks(vocab))
        peaks, noisy = (empty_best(rows, vocab, logits.device) for _ in range(2))
        sums = None
        _peaks[grid](*peaks, logits, **constants(vocab), **OPTIONS)
        joined = constants(vocab, joins=True)
        if probs is not None:
            sums = torch.empty(grid, dtype=torch.int64, device=logits.device)
            _weigh[grid](sums, *peaks, logits, requests, **joined, **OPTIONS)
            if tokens is not None:
                target = constants(probs.shape[-1])
                _clear[(rows, num_chunks(probs.shape[-1]))](
                    probs, query_len, step, **target, **OPTIONS
                )
        shared = (probs, tokens, requests, query_len, step)
        joined["TARGET_VOCAB"] = 0 if probs is None else probs.shape[-1]
        if self._sampling == "greedy":
            noisy = peaks
        else:
            _draw[grid](*noisy, *peaks, sums, logits, *shared, **joined, **OPTIONS)
        _write[(rows,)](chosen, drafts, *noisy, *peaks, *shared, **joined, **_JOIN_OPTIONS)


@triton.jit
def _peaks(values, columns, logits, VOCAB: tl.constexpr, CHUNK: tl.constexpr):
    """The likeliest column of one chunk of a row."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    lanes, inside = lanes_of(chunk, VOCAB, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * VOCAB + lanes, mask=inside, other=NONE)
    number, column = best_number(x, lanes, inside, VOCAB)
    left: tl.constexpr = (VOCAB + CHUNK - 1) // CHUNK
    tl.store(values + row * left + chunk, number.to(tl.float64))
    tl.store(columns + row * left + chunk, column)


@triton.jit
def _top_of(values, columns, requests, row, COUNT: tl.constexpr, PADDED: tl.constexpr):
    """A row's largest number, its temperature, and whether its draft is drawn with noise."""
    top, _ = joined_best(values, columns, row, COUNT, PADDED, 0)
    temperature = real(requests + row * WORDS, TEMPERATURE)
    return top.to(tl.float32), temperature, (temperature != 0.0) & (top > NONE)


@triton.jit
def _weigh(
    sums,
    values,
    columns,
    logits,
    requests,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    PADDED: tl.constexpr,
):
    """What the columns of one chunk of a row weigh."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    left: tl.constexpr = (VOCAB + CHUNK - 1) // CHUNK
    largest, temperature, is_drawn = _top_of(values, columns, requests, row, left, PADDED)
    if is_drawn:
        lanes, inside = lanes_of(chunk, VOCAB, CHUNK)
        x = tl.load(logits + row.to(tl.int64) * VOCAB + lanes, mask=inside, other=NONE)
        weights = as_integer(weight(scaled(x, largest, temperature)))
        tl.store(sums + row * left + chunk, tl.sum(weights, 0))


@triton.jit(do_not_specialize=["query_len", "step"])
def _clear(probs, query_len, step, VOCAB: tl.constexpr, CHUNK: tl.constexpr):
    """Zeros for one chunk of a draft's distribution, of whose tokens the columns are but some."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    lanes, inside = lanes_of(chunk, VOCAB, CHUNK)
    q_row = probs + (row * query_len + step).to(tl.int64) * VOCAB
    tl.store(q_row + lanes, tl.zeros((CHUNK,), tl.float32), mask=inside)


@triton.jit(do_not_specialize=["query_len", "step"])
def _draw(
    noisy_values,
    noisy_columns,
    values,
    columns,
    sums,
    logits,
    probs,
    tokens,
    requests,
    query_len,
    step,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    PADDED: tl.constexpr,
    TARGET_VOCAB: tl.constexpr,
):
    """The best column of one chunk of a row under its noise; where there are `probs`, those of the
    chunk, which are what the draft is drawn from."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    left: tl.constexpr = (VOCAB + CHUNK - 1) // CHUNK
    largest, temperature, is_drawn = _top_of(values, columns, requests, row, left, PADDED)
    lanes, inside = lanes_of(chunk, VOCAB, CHUNK)
    ids = lanes
    if tokens is not None:
        ids = tl.load(tokens + lanes, mask=inside, other=0)
    numbers = tl.zeros((CHUNK,), tl.float32)
    if is_drawn:
        x = tl.load(logits + row.to(tl.int64) * VOCAB + lanes, mask=inside, other=NONE)
        numbers = scaled(x, largest, temperature)
        if probs is not None:
            total = total_weight(sums, row, left, PADDED)
            numbers = (weight(numbers).to(tl.float64) / total).to(tl.float32)
    if probs is not None:
        q_row = probs + (row * query_len + step).to(tl.int64) * TARGET_VOCAB
        tl.store(q_row + ids, numbers, mask=inside)
    if is_drawn:
        entry = requests + row * WORDS
        position = tl.load(entry + NUM_TOKENS) + step
        place = place_of(entry + SEED, position, TARGET if probs is None else DRAFT)
        if tokens is None:
            words = words_from(chunk * CHUNK, place, CHUNK)
        else:
            words = words_of(ids, place)
        value, column = noisy_best(numbers, words, lanes, inside, VOCAB, probs is not None)
        tl.store(noisy_values + row * left + chunk, value)
        tl.store(noisy_columns + row * left + chunk, column)


@triton.jit(do_not_specialize=["query_len", "step"])
def _write(
    chosen,
    drafts,
    noisy_values,
    noisy_columns,
    values,
    columns,
    probs,
    tokens,
    requests,
    query_len,
    step,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    PADDED: tl.constexpr,
    TARGET_VOCAB: tl.constexpr,
):
    """One request's draft; where it is not drawn, its probability is 1."""
    row = tl.program_id(0)
    left: tl.constexpr = (VOCAB + CHUNK - 1) // CHUNK
    top, column = joined_best(values, columns, row, left, PADDED, VOCAB)
    is_drawn = (real(requests + row * WORDS, TEMPERATURE) != 0.0) & (top > NONE)
    if is_drawn:
        _, column = joined_best(noisy_values, noisy_columns, row, left, PADDED, VOCAB)
    token = tl.where(column < VOCAB, column, 0)
    if tokens is not None:
        token = tl.load(tokens + token)
    tl.store(chosen + row, token)
    tl.store(drafts + row * query_len + step, token)
    if probs is not None:
        q_row = probs + (row * query_len + step).to(tl.int64) * TARGET_VOCAB
        tl.store(q_row + token, 1.0, mask=~is_drawn)


def _specs(
    vocab: int, sampling: DraftSampling, target_vocab: int | None = None
) -> list[KernelSpec]:
    types = dict.fromkeys(("logits", "probs"), "*fp32") | {"sums": "*i64"}
    types |= dict.fromkeys(("values", "noisy_values"), "*fp64")
    types |= dict.fromkeys(("query_len", "step"), "i32")
    drawn = sampling == "probabilistic"
    name = f"{sampling} draft {vocab}" + (f" of {target_vocab}" if target_vocab else "")
    plain, joined = constants(vocab), constants(vocab, joins=True)
    given: dict[str, object] = {**joined, "TARGET_VOCAB": (target_vocab or vocab) if drawn else 0}
    given |= {} if drawn else {"probs": None}
    given |= {} if target_vocab else {"tokens": None}
    drawing: dict[str, object] = given if drawn else {**given, "sums": None}
    specs = [
        spec(f"{name}: draw", _draw, drawing, types),
        spec(f"{name}: write", _write, given, types, _JOIN_OPTIONS),
    ]
    if drawn:
        specs.append(spec(f"{name}: weigh", _weigh, joined, types))
        specs.append(spec(f"{name}: clear", _clear, plain, types))
    elif not target_vocab:
        specs.append(spec(f"draft peaks {vocab}", _peaks, plain, types))
    return specs


COMPILED: tuple[KernelSpec, ...] = (
    *_specs(49_152, "coupled"),
    *_specs(49_152, "probabilistic"),
    *_specs(32_000, "coupled", 151_936),
    *_specs(32_000, "probabilistic", 151_936),
)
