"""The row-invariance probe: at start, every piece of the forward is shown to compute rows alone.

`numerics="invariant"` promises that a row's bits depend on nothing that shares its call. Each piece
of the forward runs on the same rows in the cells' row counts and a sample of prefill's, at several
places of the call, and the bits are compared. The verifier is integers, and is not probed.
A pass is remembered by machine, versions and sizes; a failure refuses to start and names the piece.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from capture.cache import cache_key, machine_facts, read_entry, write_entry
from graphengine.attention.base import AttentionBatch
from graphengine.kernels import build
from graphengine.models import torch_ops
from graphengine.models.config import ModelConfig
from graphengine.models.decoder import Decoder, LayerWeights

logger = logging.getLogger(__name__)

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Problem:
    """A fixed input of one piece; `rows(low, high)` computes some of its rows from those alone."""

    name: str
    num_rows: int
    rows: Callable[[int, int], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """What the probe found; it passed, or it would have raised."""

    cached: bool  # remembered from an earlier start
    row_counts: tuple[int, ...]
    seconds: float


def check_row_invariance(
    decoder: Decoder, *, row_counts: Sequence[int], max_model_len: int, compile_mode: str
) -> ProbeReport:
    """Probe every piece over the row counts in use.

    Args:
        decoder: the model, loaded.
        row_counts: rows of a call, as cells and prefill use them.
        max_model_len: positions that may occur.
        compile_mode: which implementation `decoder.ops` is; part of the memory's key.

    Raises:
        ValueError: a piece gives a row other bits in other company.
    """
    start = time.perf_counter()
    counts = tuple(sorted({1, *row_counts}))
    key = cache_key(
        machine_facts()
        | {
            "pieces": _source_digest(),
            "kernels": build.library_key(),
            "model": asdict(decoder.config),
            "dtype": decoder.weights.embed.dtype,
            "compile": compile_mode,
            "rows": counts,
            "max_model_len": max_model_len,
        }
    )
    entry = read_entry("numerics", key)
    cached = entry is not None and entry.get("invariant") is True
    if not cached:
        for problem in _problems(decoder, max(counts), max_model_len):
            _check(problem, [count for count in counts if count <= problem.num_rows])
        write_entry("numerics", key, {"invariant": True})
    report = ProbeReport(cached=cached, row_counts=counts, seconds=time.perf_counter() - start)
    logger.info("row invariance holds (%.2f s)", report.seconds)
    return report


def _source_digest() -> str:
    """Of the code that is probed and of the probe."""
    digest = hashlib.blake2b(digest_size=12)
    for module in (torch_ops, sys.modules[__name__]):
        digest.update(inspect.getsource(module).encode())
    return digest.hexdigest()


def _check(problem: Problem, counts: Sequence[int]) -> None:
    most = problem.num_rows
    expected = problem.rows(0, most)
    for count in counts:
        for low in sorted({0, (most - count) // 2, most - count}):
            if not same_bits(problem.rows(low, low + count), expected[low : low + count]):
                raise ValueError(
                    f"numerics='invariant': {problem.name} gives a row other bits among {count} "
                    f"rows than among {most} on this machine; use CaptureConfig(compile='native'), "
                    "or numerics='fast', which does without the guarantee"
                )


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equality of the stored bits, so that NaN equals itself and -0.0 differs from 0.0."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _problems(decoder: Decoder, rows: int, max_model_len: int) -> Iterator[Problem]:
    """Every piece of the forward as a problem of `rows` rows, with the first layer's weights."""
    config, ops, layer = decoder.config, decoder.ops, decoder.weights.layers[0]
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    hidden = random(rows, config.hidden_size)
    token_ids = torch.randint(config.vocab_size, (rows,), generator=generator, dtype=torch.int32)

    def embed(low: int, high: int) -> Tensor:
        out = torch.empty(high - low, config.hidden_size)
        ops.embed(out, decoder.weights.embed, token_ids[low:high])
        return out

    def norm(low: int, high: int) -> Tensor:
        out = torch.empty(high - low, config.hidden_size)
        ops.rms_norm(out, hidden[low:high], layer.input_norm)
        return out

    def gate_up(low: int, high: int) -> Tensor:
        out = torch.empty(high - low, config.intermediate_size)
        ops.gate_up(out, hidden[low:high], layer.gate_up)
        return out

    logits = random(rows, config.vocab_size)

    def argmax(low: int, high: int) -> Tensor:
        out = torch.empty(high - low, dtype=torch.int32)
        ops.argmax(out, logits[low:high])
        return out

    yield Problem("embed", rows, embed)
    yield Problem("rms_norm", rows, norm)
    yield Problem("gate_up", rows, gate_up)
    yield Problem("argmax", rows, argmax)
    yield from _linear_problems(decoder, layer, rows, random)
    yield _attention_problem(decoder, rows, max_model_len, random)


def _linear_problems(
    decoder: Decoder, layer: LayerWeights, rows: int, random: Callable[..., Tensor]
) -> Iterator[Problem]:
    matrices = {
        "qkv": (layer.qkv, layer.qkv_bias),
        "o": (layer.o, layer.o_bias),
        "down": (layer.down, None),
        "lm_head": (decoder.weights.lm_head, None),
    }
    for name, (weight, bias) in matrices.items():
        x, residual = random(rows, weight.shape[1]), random(rows, weight.shape[0])

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

        yield Problem(f"linear {name}", rows, linear)


def _attention_problem(
    decoder: Decoder, rows: int, max_model_len: int, random: Callable[..., Tensor]
) -> Problem:
    """Rotation, KV write and attention of one request's last `rows` positions.

    The K and V of all positions are written first, so that every slice finds the same history.
    """
    config, rope = decoder.config, decoder.rope
    length = min(rows + _history(config), max_model_len)
    rows = min(rows, length)
    num_blocks = -(-length // rope.block_size)
    cache = torch.zeros(
        (num_blocks + 1, 2, rope.block_size, config.num_kv_heads, config.head_dim),
        dtype=decoder.weights.embed.dtype,
    )
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
        batch = AttentionBatch(table, starts, positions[span])
        decoder.attention.plan(batch)
        decoder.attention.run(out, rotated, cache, batch)
        return torch.cat((out, rotated), dim=1)

    return Problem("attention", rows, attend)


def _history(config: ModelConfig) -> int:
    """Tokens before the probed rows: several KV chunks, and more than a sliding window."""
    return max(300, min(config.sliding_window or 0, 1024))
