"""What the row-invariance probe runs: every piece of the captured step on inputs of its own.

Owns the problems. A problem's rows can be computed some at a time, at any place of a call; whether
they come out the same is for `numerics.py` to check. Uses the first layer's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from capture.stream import InlineStream
from graphengine.attention.base import AttentionBatch, plan
from graphengine.models.config import ModelConfig
from graphengine.models.decoder import Decoder
from graphengine.opset import OpSet
from graphengine.request import Request
from graphengine.request_state import MAX_STOP_IDS
from graphengine.sampling.masks import mask_words
from graphengine.sampling.params import MAX_LOGPROBS, SamplingParams
from graphengine.sampling.state import SamplerState
from graphengine.sampling.verifier import NO_STOP, GreedyVerify, packed_width

Tensor = torch.Tensor
# Contexts of requests that share a call: around the edges of the kernels' KV chunks of 64.
CONTEXTS = (1, 2, 7, 40, 63, 64, 65, 100, 127, 128, 129, 200, 256, 300)
MOST_ROWS = 7  # of one request in such a call
# Requests whose rows share the sampler's calls; one more is greedy.
SAMPLED = (
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.6, top_k=50, top_p=0.9, min_p=0.01, seed=2),
    SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5, logit_bias={0: 3.0}),
)
VERIFIED_BATCHES = 8
MOST_WIDE_BYTES = 256 << 20  # of a problem as wide as the vocabulary, which has four copies of that
VERIFIED_IDS = 4  # few token ids, so that drafts are often confirmed


@dataclass(frozen=True, slots=True)
class Problem:
    """A fixed input of one piece; `rows(low, high)` computes some of its rows from those alone."""

    name: str
    num_rows: int
    rows: Callable[[int, int], Tensor]
    each: bool = False  # few and different rows: every one is run alone


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierShape:
    """The verifier and the fixed sizes of its tensors, for which alone it is compiled."""

    verify: GreedyVerify
    num_rows: int  # requests that its tensors have room for
    max_draft_tokens: int
    num_target_ids: int
    num_token_ids: int


def problems(
    decoder: Decoder, opset: OpSet, verifier: VerifierShape, *, rows: int, max_model_len: int
) -> Iterator[Problem]:
    """Every piece of the step as a problem, of `rows` rows where the piece has no other bound."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu").to(opset.device)

    wide = max(1, min(rows, MOST_WIDE_BYTES // (16 * decoder.config.vocab_size)))
    yield from _row_problems(decoder, rows, wide, random)
    yield from _linear_problems(decoder, rows, wide, random)
    yield _prefill_problem(decoder, rows, max_model_len, random)
    yield _requests_problem(decoder, max_model_len, random)
    yield _sampler_problem(opset, decoder.config.vocab_size, wide, random)
    yield _verifier_problem(verifier, generator)


def _row_problems(
    decoder: Decoder, rows: int, wide: int, random: Callable[..., Tensor]
) -> Iterator[Problem]:
    config, ops, layer = decoder.config, decoder.ops, decoder.weights.layers[0]
    hidden, logits = random(rows, config.hidden_size), random(wide, config.vocab_size)
    token_ids = (torch.arange(rows, dtype=torch.int32) * 7919) % config.vocab_size

    def embed(low: int, high: int) -> Tensor:
        out = torch.empty(high - low, config.hidden_size)
        ops.embed(out, decoder.weights.embed, token_ids[low:high])
        return out

    def rms_norm(low: int, high: int) -> Tensor:
        out = torch.empty(high - low, config.hidden_size)
        ops.rms_norm(out, hidden[low:high], layer.input_norm)
        return out

    def gate_up(low: int, high: int) -> Tensor:
        out = torch.empty(high - low, config.intermediate_size)
        ops.gate_up(out, hidden[low:high], layer.gate_up)
        return out

    def argmax(low: int, high: int) -> Tensor:
        out = torch.empty(high - low, dtype=torch.int32)
        ops.argmax(out, logits[low:high])
        return out

    for piece in (embed, rms_norm, gate_up):
        yield Problem(piece.__name__, rows, piece)
    yield Problem("argmax", wide, argmax)


def _linear_problems(
    decoder: Decoder, rows: int, wide: int, random: Callable[..., Tensor]
) -> Iterator[Problem]:
    layer = decoder.weights.layers[0]
    matrices = {
        "qkv": (layer.qkv, layer.qkv_bias, rows),
        "o": (layer.o, layer.o_bias, rows),
        "down": (layer.down, None, rows),
        "lm_head": (decoder.weights.lm_head, None, wide),
    }
    for name, (weight, bias, num_rows) in matrices.items():
        x, residual = random(num_rows, weight.shape[1]), random(num_rows, weight.shape[0])

        def linear(
            low: int,
            high: int,
            x: Tensor = x,
            residual: Tensor = residual,
            weight: Tensor = weight,
            bias: Tensor | None = bias,
        ) -> Tensor:
            out = residual[low:high].clone()
            decoder.ops.linear(out, x[low:high], weight, bias, add=True)
            return out

        yield Problem(f"linear {name}", num_rows, linear)


def _prefill_problem(
    decoder: Decoder, rows: int, max_model_len: int, random: Callable[..., Tensor]
) -> Problem:
    """Rotation, KV write and attention of one request's last `rows` positions.

    The K and V of all positions are written first, so that every slice finds the same history.
    """
    config, rope = decoder.config, decoder.rope
    length = min(rows + _history(config), max_model_len)
    rows = min(rows, length)
    num_blocks = -(-length // rope.block_size)
    cache = torch.zeros(_cache_shape(decoder, num_blocks), dtype=decoder.weights.embed.dtype)
    positions = torch.arange(length, dtype=torch.int32)
    slots = positions + rope.block_size  # block 0 is the null block
    table = torch.arange(1, num_blocks + 1, dtype=torch.int32)[None]
    layer = decoder.weights.layers[0]
    norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
    qkv = random(length, config.q_size + 2 * config.kv_size)
    decoder.ops.rope_write(qkv.clone(), cache, rope, positions, slots, norms)

    def attend(low: int, high: int) -> Tensor:
        span = slice(length - rows + low, length - rows + high)
        rotated, out = qkv[span].clone(), torch.empty(high - low, config.q_size)
        decoder.ops.rope_write(rotated, cache, rope, positions[span], slots[span], norms)
        starts = torch.tensor([0, high - low], dtype=torch.int32)
        batch = AttentionBatch(table, starts, positions[span], high - low)
        plan(decoder.attention, batch)
        decoder.attention.run(out, rotated, cache, batch)
        return torch.cat((out, rotated), dim=1)

    return Problem("attention", rows, attend)


def _requests_problem(
    decoder: Decoder, max_model_len: int, random: Callable[..., Tensor]
) -> Problem:
    """Attention of several requests with other contexts, ragged as chunks and drafts are.

    A row of the problem is a request. They end before, at and behind the edges of KV chunks, and
    each sees the same pages in another order.
    """
    config, size = decoder.config, decoder.rope.block_size
    ends = [end for end in CONTEXTS if end < max_model_len] + [max_model_len]
    ends = [min(end, CONTEXTS[-1]) for end in ends]
    lengths = [min(end, 1 + index % MOST_ROWS) for index, end in enumerate(ends)]
    num_blocks = -(-max(ends) // size)
    cache = random(*_cache_shape(decoder, num_blocks)).to(decoder.weights.embed.dtype)
    blocks = torch.arange(1, num_blocks + 1, dtype=torch.int32)
    tables = torch.stack([blocks.roll(shift) for shift in range(len(ends))])
    qkv = random(len(ends), MOST_ROWS, config.q_size + 2 * config.kv_size)

    def attend(low: int, high: int) -> Tensor:
        some = range(low, high)
        starts = torch.tensor([0, *(lengths[i] for i in some)]).cumsum(0).int()
        positions = torch.cat([torch.arange(ends[i] - lengths[i], ends[i]) for i in some]).int()
        batch = AttentionBatch(tables[low:high].contiguous(), starts, positions, MOST_ROWS)
        out = torch.empty(len(positions), config.q_size)
        plan(decoder.attention, batch)
        rows = torch.cat([qkv[i, : lengths[i]] for i in some])
        decoder.attention.run(out, rows, cache, batch)
        padded = torch.zeros(high - low, MOST_ROWS, config.q_size)
        for index, request in enumerate(out.split([lengths[i] for i in some])):
            padded[index, : len(request)] = request
        return padded.view(high - low, -1)

    return Problem("attention of several requests", len(ends), attend, each=True)


def _cache_shape(decoder: Decoder, num_blocks: int) -> tuple[int, ...]:
    """Of one layer's KV cache with `num_blocks` blocks beside the null block."""
    config = decoder.config
    size = decoder.rope.block_size
    return (num_blocks + 1, 2, size, config.num_kv_heads, config.head_dim)


def _history(config: ModelConfig) -> int:
    """Tokens before the probed rows: several KV chunks, and more than a sliding window."""
    return max(300, min(config.sliding_window or 0, 1024))


def _sampler_problem(
    opset: OpSet, vocab_size: int, rows: int, random: Callable[..., Tensor]
) -> Problem:
    """What the sampler gives for requests of several kinds, in blocks of two rows.

    A row of the problem is a request; some have a draft, some of these a distribution for it.
    """
    state = SamplerState(
        max_num_seqs=len(SAMPLED),
        vocab_size=vocab_size,
        device=opset.device,
        stream=InlineStream(),
    )
    for row, params in enumerate(SAMPLED):
        state.start(row, Request("probe", [row], params, max_model_len=2))
    sampler, logprobs = opset.sampler(state, rejection=True), opset.logprobs()
    num_reqs = max(1, rows // 2)
    logits = 4 * random(2 * num_reqs, vocab_size)
    each = {
        "state_rows": torch.arange(num_reqs, dtype=torch.int32) % (len(SAMPLED) + 1),
        "num_draft_tokens": torch.arange(num_reqs, dtype=torch.int32) % 3 % 2,
        "has_draft_probs": torch.arange(num_reqs, dtype=torch.int32) % 2,
    }
    by_row = {
        "logits": logits,
        "draft_probs": logits.roll(1, -1).softmax(-1),
        "token_ids": logits.roll(1, -1).argmax(-1).int().roll(1),
        "positions": torch.arange(2 * num_reqs, dtype=torch.int32),
        "mask": torch.full((2 * num_reqs, mask_words(vocab_size)), -1, dtype=torch.int32),
    }

    def sample(low: int, high: int) -> Tensor:
        count, part = high - low, slice(2 * low, 2 * high)
        views = {name: tensor[low:high] for name, tensor in each.items()}
        views |= {name: tensor[part] for name, tensor in by_row.items()}
        views |= {
            "query_len": torch.tensor([2], dtype=torch.int32),
            "processed": torch.empty(2 * count, vocab_size),
            "target_ids": torch.empty(2 * count, dtype=torch.int32),
            "logprob_ids": torch.empty(2 * count, MAX_LOGPROBS + 1, dtype=torch.int32),
            "logprob_values": torch.empty(2 * count, MAX_LOGPROBS + 1),
            "logprob_ranks": torch.empty(2 * count, 1, dtype=torch.int32),
        }
        sampler(views)
        logprobs(views)
        outputs = ("processed", "logprob_values", "logprob_ids", "logprob_ranks")
        found = [views[name].float() for name in outputs]
        found.append(views["target_ids"][:, None].float())
        return torch.cat(found, dim=1).view(count, -1)

    return Problem("sampler", num_reqs, sample)


def _verifier_problem(shape: VerifierShape, generator: torch.Generator) -> Problem:
    """Several batches of requests with ragged drafts; what a call leaves out of one is padding."""
    num_rows, query_len = shape.num_rows, shape.max_draft_tokens + 1
    width = packed_width(shape.max_draft_tokens)

    def draw(high: int, *size: int) -> Tensor:
        size = (VERIFIED_BATCHES, num_rows, *size)
        drawn = torch.randint(high, size, generator=generator, dtype=torch.int32, device="cpu")
        return drawn.to(torch.get_default_device())

    targets = draw(VERIFIED_IDS, query_len)
    tokens = targets.roll(1, -1)  # the drafts are the targets of the rows before: confirmed,
    tokens[draw(4, query_len) == 0] = VERIFIED_IDS  # but for every fourth
    num_drafts = draw(query_len)
    stops = draw(4 * VERIFIED_IDS * MAX_STOP_IDS, MAX_STOP_IDS)
    room = draw(2 * query_len) + 1

    def verify(low: int, high: int) -> Tensor:
        found = []
        for batch in range(VERIFIED_BATCHES):
            packed = torch.zeros(num_rows, width, dtype=torch.int32)
            shape.verify(
                packed,
                _filled(targets[batch, low:high].flatten(), shape.num_target_ids, 0),
                _filled(tokens[batch, low:high].flatten(), shape.num_token_ids, 0),
                torch.tensor([query_len], dtype=torch.int32),
                _filled(num_drafts[batch, low:high], num_rows, 0),
                _filled(stops[batch, low:high], num_rows, NO_STOP),
                _filled(room[batch, low:high], num_rows, 1),
            )
            found.append(packed[: high - low])
        return torch.cat(found, dim=1)

    return Problem("verifier", num_rows, verify, each=True)


def _filled(live: Tensor, size: int, fill: int) -> Tensor:
    """`live`, padded with `fill` to `size` rows."""
    out = torch.full((size, *live.shape[1:]), fill, dtype=live.dtype)
    out[: len(live)] = live
    return out
