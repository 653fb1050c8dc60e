"""Start-up: from a checkpoint and a configuration to everything that an engine runs with.

Owns the order of things: read headers, resolve and check every size, and only then read weights,
allocate, capture. Keeps the seconds of each phase. Nothing here runs after start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from capture.manager import check_memory_budget
from graphengine.captured_step import make_buffers
from graphengine.config import EngineConfig
from graphengine.kernels import library
from graphengine.kv import cache as kv_cache
from graphengine.model_runner import ModelRunner
from graphengine.models.decoder import DecoderWeights
from graphengine.models.loader import OpenedModel, load_weights, open_model
from graphengine.models.tokenizer import Tokenizer
from graphengine.numerics import check_row_invariance
from graphengine.request_state import RequestState
from graphengine.resolve import ResolvedConfig, resolve
from proposers import registry
from proposers.base import Proposer

# Called with (phase, done, total, what) in the phases `weights` and `capture`.
StartProgress = Callable[[str, int, int, str], None]


@dataclass(slots=True)
class StartTimes:
    """Seconds of each phase of the start, in order."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def __str__(self) -> str:
        parts = [f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items()]
        return ", ".join([*parts, f"total {sum(self.seconds.values()):.2f} s"])


@dataclass(frozen=True, slots=True)
class EngineRuntime:
    """What a proposer is told about its engine (`proposers.base.Runtime`)."""

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_draft_tokens: int
    device: torch.device


@dataclass(slots=True, kw_only=True)
class Started:
    """What `start` built."""

    resolved: ResolvedConfig
    runner: ModelRunner
    state: RequestState
    tokenizer: Tokenizer | None
    times: StartTimes


def start(
    model: str | Path, config: EngineConfig, progress: StartProgress | None = None
) -> Started:
    """Build everything. Returns when the whole table is captured: what is returned is ready to
    serve.

    Raises:
        ValueError: the checkpoint or the configuration is refused.
    """
    times = StartTimes()
    with times.phase("headers"):
        opened = open_model(model)
        resolved = resolve(opened.config, config)
        planned = make_buffers(resolved.model, resolved.sizes, torch.device("meta"))
        check_memory_budget(config.capture, planned.num_bytes)
        kv_cache.check_memory(
            resolved.model,
            resolved.dtype,
            num_blocks=resolved.num_blocks,
            block_size=resolved.sizes.block_size,
        )
    with times.phase("kernels"):
        library.load()
    with times.phase("weights"):
        weights = _load(opened, resolved, progress)
    with times.phase("tokenizer"):
        tokenizer = opened.load_tokenizer()
    sizes = resolved.sizes
    with times.phase("buffers"):
        state = RequestState(
            max_num_seqs=sizes.max_num_seqs,
            max_model_len=sizes.max_model_len,
            block_size=sizes.block_size,
        )
        caches = kv_cache.allocate(
            resolved.model,
            resolved.dtype,
            num_blocks=resolved.num_blocks,
            block_size=sizes.block_size,
            device=resolved.device,
        )
        runner = ModelRunner(resolved, weights, caches, capture=config.capture, state=state)
    if config.numerics == "invariant":
        with times.phase("numerics"):
            check_row_invariance(
                runner.decoder,
                runner.verifier_shape,
                row_counts=runner.row_counts,
                max_model_len=sizes.max_model_len,
                compile_mode=config.capture.compile,
            )
    with times.phase("capture"):
        runner.capture(None if progress is None else lambda *done: progress("capture", *done))
    return Started(resolved=resolved, runner=runner, state=state, tokenizer=tokenizer, times=times)


def make_proposer(resolved: ResolvedConfig) -> Proposer | None:
    """The proposer that the configuration names; None where speculation is off."""
    speculative, sizes = resolved.speculative, resolved.sizes
    if speculative is None:
        return None
    runtime = EngineRuntime(
        vocab_size=resolved.model.vocab_size,
        max_model_len=sizes.max_model_len,
        max_num_seqs=sizes.max_num_seqs,
        max_draft_tokens=sizes.max_draft_tokens,
        device=resolved.device,
    )
    return registry.create(speculative.method, dict(speculative.options), runtime)


def _load(
    opened: OpenedModel, resolved: ResolvedConfig, progress: StartProgress | None
) -> DecoderWeights:
    weights = DecoderWeights.allocate(resolved.model, resolved.dtype, resolved.device)
    load_weights(
        weights.destinations(resolved.model),
        opened.source,
        config=resolved.model,
        progress=None if progress is None else lambda *done: progress("weights", *done),
    )
    return weights
