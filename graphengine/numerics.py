"""The row-invariance probe: at start, every piece of the step is shown to compute rows alone.

`numerics="invariant"` promises that a row's bits depend on nothing that shares its call. Each piece
of the captured step (`probe.py`) runs on the same rows in the cells' row counts and a sample of
prefill's, at several places of the call, and the bits are compared. A pass is remembered by
machine, versions and sizes; a failure refuses to start and names the piece.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass

import torch

from capture.cache import cache_key, machine_facts, read_entry, write_entry
from graphengine import probe
from graphengine.attention import cpu as attention_cpu
from graphengine.kernels import ops
from graphengine.models import native_ops, torch_ops
from graphengine.models.decoder import Decoder
from graphengine.opset import OpSet
from graphengine.probe import Problem, VerifierShape, problems
from graphengine.sampling import cpu as sampling_cpu
from graphengine.sampling import masks, settings, state
from graphengine.sampling import verifier as verifier_torch

logger = logging.getLogger(__name__)

# Modules whose Python decides what a probed piece computes, or what the probe looks at.
PROBED = (
    native_ops,
    torch_ops,
    attention_cpu,
    sampling_cpu,
    masks,
    settings,
    state,
    verifier_torch,
    ops,
    probe,
    sys.modules[__name__],
)

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """What the probe found; it passed, or it would have raised."""

    cached: bool  # remembered from an earlier start
    seconds: float


def check_row_invariance(
    decoder: Decoder,
    opset: OpSet,
    verifier: VerifierShape,
    *,
    row_counts: Sequence[int],
    max_model_len: int,
) -> ProbeReport:
    """Probe every piece over the row counts in use.

    Args:
        decoder: the model, loaded.
        opset: what it is made of.
        verifier: what the step ends with.
        row_counts: rows of a call, as cells and prefill use them.
        max_model_len: positions that may occur.

    Raises:
        ValueError: a piece gives a row other bits in other company.
    """
    start = time.perf_counter()
    counts = tuple(sorted({1, *row_counts}))
    key = probe_key(
        decoder,
        verifier,
        row_counts=counts,
        max_model_len=max_model_len,
        opset=f"{opset.fingerprint}, attention {decoder.attention.name}",
    )
    entry = read_entry("numerics", key)
    cached = entry is not None and entry.get("invariant") is True
    if not cached:
        rows = max(counts)
        with _making_tensors_on(opset.device):
            for one in problems(decoder, opset, verifier, rows=rows, max_model_len=max_model_len):
                _check(one, [count for count in counts if count <= one.num_rows])
        write_entry("numerics", key, {"invariant": True})
    report = ProbeReport(cached=cached, seconds=time.perf_counter() - start)
    logger.info("row invariance holds (%.2f s)", report.seconds)
    return report


def _making_tensors_on(device: torch.device) -> AbstractContextManager[object]:
    """Where the problems' tensors are made.

    Nothing on CPU, which is torch's default: pieces that are compiled under torch's mode for this
    are compiled again without it.
    """
    return nullcontext() if device.type == "cpu" else device


def probe_key(
    decoder: Decoder,
    verifier: VerifierShape,
    *,
    row_counts: Sequence[int],
    max_model_len: int,
    opset: str,
) -> str:
    """Key of a remembered pass: everything that the probed code and its inputs depend on.

    Arguments are those of `check_row_invariance`, and the fingerprint of the op set. The values of
    the weights are not in it: no piece takes another path for them.
    """
    return cache_key(
        machine_facts()
        | {
            "pieces": _source_digest(),
            "model": asdict(decoder.config),
            "dtype": decoder.weights.embed.dtype,
            "block_size": decoder.rope.block_size,
            "opset": opset,
            "rows": row_counts,
            "requests": (verifier.num_rows, verifier.max_draft_tokens),
            "max_model_len": max_model_len,
        }
    )


def _source_digest() -> str:
    """Of the Python that is probed and of the probe."""
    digest = hashlib.blake2b(digest_size=12)
    for module in PROBED:
        digest.update(inspect.getsource(module).encode())
    return digest.hexdigest()


def _check(problem: Problem, counts: Sequence[int]) -> None:
    most = problem.num_rows
    expected = problem.rows(0, most)
    for count in counts:
        every = problem.each and count == 1
        for low in range(most) if every else sorted({0, (most - count) // 2, most - count}):
            if not same_bits(problem.rows(low, low + count), expected[low : low + count]):
                raise ValueError(
                    f"numerics='invariant': {problem.name} gives a row other bits among {count} "
                    f"rows than among {most} on this machine; use another CaptureConfig.compile, "
                    "or numerics='fast', which does without the guarantee"
                )


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equality of the stored bits, so that NaN equals itself and -0.0 differs from 0.0."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
