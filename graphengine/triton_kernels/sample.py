"""sample_rows and reject_rows: the token of every row, and what takes a refused draft's place.

Each chunk of a row gives its best token, and one program a row joins them: lowest id on ties. The
argmax of greedy rows and the Gumbel-max of the others (see `noise.py`) share that. Definitions are
in `sampling/reference.py`; probabilities are fp32 weights over a sum of integer ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.triton_kernels.chunks import (
    NONE,
    ONE,
    OPTIONS,
    SEED,
    TEMPERATURE,
    WORDS,
    as_integer,
    best_number,
    check_contiguous,
    constants,
    lanes_of,
    load_left,
    num_chunks,
    real,
    spec,
    weight,
)
from graphengine.triton_kernels.noise import (
    ACCEPTANCE,
    RESIDUAL,
    TARGET,
    noisy_best,
    place_of,
    uniform,
    words_from,
    words_of,
)
from graphengine.triton_kernels.specs import KernelSpec

Tensor = torch.Tensor

_JOIN_OPTIONS = OPTIONS | {"num_warps": 1}


def empty_best(rows: int, vocab: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where chunks leave their best: values [rows, chunks] float64 and tokens, int32."""
    shape = (rows, num_chunks(vocab))
    values = torch.empty(shape, dtype=torch.float64, device=device)
    return values, torch.empty(shape, dtype=torch.int32, device=device)


def sample_rows(
    target_ids: Tensor,
    processed: Tensor,
    positions: Tensor,
    query_len: Tensor,
    state_rows: Tensor,
    settings: Tensor,
) -> None:
    """Write `target_ids` [T] int32: each row's likeliest token where it is greedy, else the one
    that its noise chooses.

    Args:
        processed: [T, vocab] fp32, as `process_logits` leaves it.
        positions: [T] int32, of the token before the one that is chosen.
    """
    check_contiguous(target_ids, processed, positions, query_len, state_rows, settings)
    rows, vocab = processed.shape
    best = empty_best(rows, vocab, processed.device)
    _sample[(rows, num_chunks(vocab))](
        *best,
        processed,
        positions,
        query_len,
        state_rows,
        settings,
        **constants(vocab),
        **OPTIONS,
    )
    _join[(rows,)](target_ids, *best, **constants(vocab, joins=True), **_JOIN_OPTIONS)


def reject_rows(
    target_ids: Tensor,
    processed: Tensor,
    draft_probs: Tensor,
    num_draft_tokens: Tensor,
    has_draft_probs: Tensor,
    settings: Tensor,
    *cell: Tensor,
) -> None:
    """Overwrite `target_ids` [T] int32 of rows before a draft: the draft where it is accepted, else
    one from what is left of the target's distribution. Greedy rows stay as they are.

    Args:
        draft_probs: [T, vocab] fp32, by which each row's draft was drawn; read where
            `has_draft_probs` [num_reqs] int32 is not 0. Other drafts were certain.
        num_draft_tokens: [num_reqs] int32.
        cell: token_ids, positions, query_len and state_rows.
    """
    token_ids, positions, query_len, state_rows = cell
    check_contiguous(target_ids, processed, draft_probs, num_draft_tokens, has_draft_probs)
    check_contiguous(settings, *cell)
    rows, vocab = processed.shape
    sums = torch.empty(rows, num_chunks(vocab), dtype=torch.int64, device=processed.device)
    kept, others = (empty_best(rows, vocab, processed.device) for _ in range(2))
    accepted = torch.empty(rows, dtype=torch.int32, device=processed.device)
    block = (num_draft_tokens, query_len, state_rows, settings)
    _weigh[(rows, num_chunks(vocab))](sums, processed, *block, **constants(vocab), **OPTIONS)
    _reject[(rows, num_chunks(vocab))](
        accepted,
        *kept,
        *others,
        processed,
        draft_probs,
        sums,
        token_ids,
        positions,
        has_draft_probs,
        *block,
        **constants(vocab, joins=True),
        **OPTIONS,
    )
    _settle[(rows,)](
        target_ids,
        accepted,
        *kept,
        *others,
        sums,
        token_ids,
        *block,
        **constants(vocab, joins=True),
        **_JOIN_OPTIONS,
    )


@triton.jit
def _sample(
    values,
    tokens,
    processed,
    positions,
    query_len,
    state_rows,
    settings,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The best token of one chunk of a row."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    state = tl.load(state_rows + row // tl.load(query_len))
    lanes, inside = lanes_of(chunk, VOCAB, CHUNK)
    x = tl.load(processed + row.to(tl.int64) * VOCAB + lanes, mask=inside, other=NONE)
    number, token = best_number(x, lanes, inside, VOCAB)
    value = number.to(tl.float64)
    if real(settings + state * WORDS, TEMPERATURE) != 0.0 and number > NONE:
        place = place_of(settings + state * WORDS + SEED, tl.load(positions + row) + 1, TARGET)
        words = words_from(chunk * CHUNK, place, CHUNK)
        value, token = noisy_best(x, words, lanes, inside, VOCAB, False)
    left: tl.constexpr = (VOCAB + CHUNK - 1) // CHUNK
    tl.store(values + row * left + chunk, value)
    tl.store(tokens + row * left + chunk, token)


@triton.jit
def joined_best(
    values, tokens, row, COUNT: tl.constexpr, PADDED: tl.constexpr, NOBODY: tl.constexpr
):
    """The best of a row's chunks, lowest token on ties, which are in the order of their tokens."""
    value = load_left(values, row, NONE, COUNT, PADDED)
    token = load_left(tokens, row, NOBODY, COUNT, PADDED)
    best = tl.max(value, 0)
    return best, tl.min(tl.where(value == best, token, NOBODY), 0)


@triton.jit
def _join(
    target_ids, values, tokens, VOCAB: tl.constexpr, CHUNK: tl.constexpr, PADDED: tl.constexpr
):
    """One row's token; 0 of a row without a number."""
    row = tl.program_id(0)
    left: tl.constexpr = (VOCAB + CHUNK - 1) // CHUNK
    _, token = joined_best(values, tokens, row, left, PADDED, VOCAB)
    tl.store(target_ids + row, tl.where(token < VOCAB, token, 0))


@triton.jit
def _is_tested(row, num_draft_tokens, query_len, state_rows, settings):
    """Whether a draft follows the row and is not a greedy request's."""
    length = tl.load(query_len)
    request = row // length
    temperature = real(settings + tl.load(state_rows + request) * WORDS, TEMPERATURE)
    return (row % length < tl.load(num_draft_tokens + request)) & (temperature != 0.0)


@triton.jit
def _weigh(
    sums,
    processed,
    num_draft_tokens,
    query_len,
    state_rows,
    settings,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """What the tokens of one chunk of a row weigh."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    if _is_tested(row, num_draft_tokens, query_len, state_rows, settings):
        store_weight(sums, processed, row, chunk, VOCAB, CHUNK)


@triton.jit
def store_weight(sums, scaled, row, chunk, VOCAB: tl.constexpr, CHUNK: tl.constexpr):
    """Leave a chunk's weight, as an integer, in sums [T, chunks]; of nothing it is 0."""
    lanes, inside = lanes_of(chunk, VOCAB, CHUNK)
    y = tl.load(scaled + row.to(tl.int64) * VOCAB + lanes, mask=inside, other=NONE)
    left: tl.constexpr = (VOCAB + CHUNK - 1) // CHUNK
    tl.store(sums + row * left + chunk, tl.sum(as_integer(weight(y)), 0))


@triton.jit
def total_weight(sums, row, COUNT: tl.constexpr, PADDED: tl.constexpr):
    """The sum of a row's weights, float64: p of a token is its weight over it."""
    return tl.sum(load_left(sums, row, 0, COUNT, PADDED), 0).to(tl.float64) / ONE


@triton.jit
def _reject(
    accepted,
    values,
    tokens,
    other_values,
    other_tokens,
    processed,
    draft_probs,
    sums,
    token_ids,
    positions,
    has_draft_probs,
    num_draft_tokens,
    query_len,
    state_rows,
    settings,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Whether a row's draft is accepted; where not, the best token of one chunk by max(p - q, 0),
    and by p where that is 0 all over the chunk."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    left: tl.constexpr = (VOCAB + CHUNK - 1) // CHUNK
    if not _is_tested(row, num_draft_tokens, query_len, state_rows, settings):
        return
    total = total_weight(sums, row, left, PADDED)
    if total == 0.0:  # nothing to choose from
        return
    request = row // tl.load(query_len)
    y_row, q_row = processed + row.to(tl.int64) * VOCAB, draft_probs + row.to(tl.int64) * VOCAB
    draft = tl.load(token_ids + row + 1)
    drawn = tl.load(has_draft_probs + request) != 0
    seed = settings + tl.load(state_rows + request) * WORDS + SEED
    position = tl.load(positions + row) + 1
    p = weight(tl.load(y_row + draft)).to(tl.float64) / total
    q = tl.load(q_row + draft, mask=drawn, other=1.0).to(tl.float64)
    is_accepted = uniform(words_of(draft, place_of(seed, position, ACCEPTANCE))) * q < p
    tl.store(accepted + row, is_accepted.to(tl.int32))
    if is_accepted:
        return
    lanes, inside = lanes_of(chunk, VOCAB, CHUNK)
    p_all = weight(tl.load(y_row + lanes, mask=inside, other=NONE)).to(tl.float64) / total
    certain = tl.where(lanes == draft, 1.0, 0.0)
    q_all = tl.where(drawn, tl.load(q_row + lanes, mask=inside & drawn, other=0.0), certain)
    rest = tl.maximum(p_all - q_all.to(tl.float64), 0.0)
    words = words_from(chunk * CHUNK, place_of(seed, position, RESIDUAL), CHUNK)
    value, token = noisy_best(rest, words, lanes, inside, VOCAB, True)
    at = row * left + chunk
    tl.store(values + at, value)
    tl.store(tokens + at, token)
    if value == NONE:
        value, token = noisy_best(p_all, words, lanes, inside, VOCAB, True)
        tl.store(other_values + at, value)
        tl.store(other_tokens + at, token)


@triton.jit
def _settle(
    target_ids,
    accepted,
    values,
    tokens,
    other_values,
    other_tokens,
    sums,
    token_ids,
    num_draft_tokens,
    query_len,
    state_rows,
    settings,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    PADDED: tl.constexpr,
):
    """The token of one row that was tested."""
    row = tl.program_id(0)
    left: tl.constexpr = (VOCAB + CHUNK - 1) // CHUNK
    if not _is_tested(row, num_draft_tokens, query_len, state_rows, settings):
        return
    if total_weight(sums, row, left, PADDED) == 0.0:
        return
    token = tl.load(token_ids + row + 1)
    if tl.load(accepted + row) == 0:
        value, token = joined_best(values, tokens, row, left, PADDED, VOCAB)
        if value == NONE:  # p sums to 1, so here is one
            _, token = joined_best(other_values, other_tokens, row, left, PADDED, VOCAB)
    tl.store(target_ids + row, token)


def _specs(vocab: int) -> list[KernelSpec]:
    types = dict.fromkeys(("processed", "draft_probs"), "*fp32")
    types |= dict.fromkeys(("values", "other_values"), "*fp64") | {"sums": "*i64"}
    plain, joined = constants(vocab), constants(vocab, joins=True)
    return [
        spec(f"sample {vocab}", _sample, plain, types),
        spec(f"join {vocab}", _join, joined, types, _JOIN_OPTIONS),
        spec(f"weigh {vocab}", _weigh, plain, types),
        spec(f"reject {vocab}", _reject, joined, types),
        spec(f"settle {vocab}", _settle, joined, types, _JOIN_OPTIONS),
    ]


COMPILED: tuple[KernelSpec, ...] = (*_specs(49_152), *_specs(151_936))
