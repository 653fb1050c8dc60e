"""Start-up: from a checkpoint and a configuration to everything that an engine runs with.

Owns the order of things: read headers, resolve and check every size, and only then read weights,
allocate, capture. Keeps the seconds of each phase. Nothing here runs after start.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from capture.cuda import CudaStream
from capture.manager import check_memory_budget
from capture.stream import InlineStream, Stream, ThreadStream
from graphengine.cell_times import ensure_cell_times
from graphengine.config import EngineConfig, is_native
from graphengine.draft_length.choice import make_draft_length
from graphengine.draft_length.controller import DraftLength
from graphengine.draft_runtime import EngineDraftRuntime
from graphengine.drafting import needs_tokens
from graphengine.kernels import library
from graphengine.kv import cache as kv_cache
from graphengine.memory import available_bytes, plan_memory
from graphengine.model_runner import ModelRunner
from graphengine.models.decoder import DecoderWeights
from graphengine.models.loader import OpenedModel, load_weights, open_model
from graphengine.models.sampling_defaults import SamplingDefaults
from graphengine.models.tokenizer import Tokenizer
from graphengine.numerics import check_row_invariance
from graphengine.request_state import RequestState
from graphengine.resolve import ResolvedConfig, resolve
from graphengine.runtime import EngineRuntime
from proposers import registry
from proposers.base import Proposer

logger = logging.getLogger(__name__)

# Called with (phase, done, total, what) in the phases `weights` and `capture`.
StartProgress = Callable[[str, int, int, str], None]


@dataclass(slots=True)
class StartTimes:
    """Seconds of each phase of the start, in order, and what was found in caches.

    A phase includes what was done since the one before, so they add up to the whole.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    cached: dict[str, bool] = field(default_factory=dict)  # of phases whose work is cached
    _mark: float = field(default_factory=lambda: time.perf_counter())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        assert name not in self.seconds, f"phase {name} twice"
        yield
        now = time.perf_counter()
        self.seconds[name], self._mark = now - self._mark, now

    @property
    def warm(self) -> bool:
        """Whether nothing was compiled or probed that a cache can hold."""
        return all(self.cached.values())

    def __str__(self) -> str:
        notes = {True: " (cached)", False: " (not cached)", None: ""}
        parts = [
            f"{name} {seconds:.2f} s{notes[self.cached.get(name)]}"
            for name, seconds in self.seconds.items()
        ]
        total = f"total {sum(self.seconds.values()):.2f} s"
        return ", ".join([*parts, total, "a warm start" if self.warm else "a cold start"])


@dataclass(slots=True, kw_only=True)
class Started:
    """What `start` built."""

    resolved: ResolvedConfig
    runner: ModelRunner
    state: RequestState
    proposer: Proposer | None
    draft_length: DraftLength
    tokenizer: Tokenizer | None
    sampling_defaults: SamplingDefaults
    times: StartTimes


def start(
    model: str | Path,
    config: EngineConfig,
    progress: StartProgress | None = None,
    proposer: Proposer | None = None,
) -> Started:
    """Build everything. Returns when the whole table is captured: what is returned is ready to
    serve.

    Args:
        proposer: to be used instead of the one that the configuration names.

    Raises:
        ValueError: the checkpoint or the configuration is refused.
    """
    times = StartTimes()
    with times.phase("headers"):
        opened = open_model(model)
        resolved = resolve(opened.config, config, opened)
        planned = plan_memory(resolved)
        check_memory_budget(config.capture, planned.buffers)
        planned.check(available_bytes(resolved.device))
    with times.phase("tokenizer"):
        tokenizer = opened.load_tokenizer()
    if is_native(config.capture, resolved.device):
        with times.phase("kernels"):
            times.cached["kernels"] = library.ensure_loaded()
    with times.phase("weights"):
        weights = _load(opened, resolved, progress)
    with times.phase("buffers"):
        state, runner = _make_runner(resolved, weights, config)
    if proposer is None and resolved.speculative is not None:
        with times.phase("proposer"):
            proposer = _make_proposer(resolved, runner)
    _check_proposer(proposer, config)
    _check_numerics(runner, config, times)
    _capture(runner, proposer, progress, times)
    if proposer is not None and resolved.speculative and resolved.speculative.adaptive is True:
        with times.phase("timing"):
            times.cached["timing"] = ensure_cell_times(resolved, config.capture, runner)
    return Started(
        resolved=resolved,
        runner=runner,
        state=state,
        proposer=proposer,
        draft_length=make_draft_length(resolved, runner.manager, proposer),
        tokenizer=tokenizer,
        sampling_defaults=opened.sampling_defaults,
        times=times,
    )


def _make_runner(
    resolved: ResolvedConfig, weights: DecoderWeights, config: EngineConfig
) -> tuple[RequestState, ModelRunner]:
    """The target over rows, KV and buffers of its own."""
    sizes, stream = resolved.sizes, make_stream(resolved.device, config.async_steps)
    state = RequestState(
        max_num_seqs=sizes.max_num_seqs,
        max_model_len=sizes.max_model_len,
        block_size=sizes.block_size,
        vocab_size=resolved.model.vocab_size,
        device=resolved.device,
        stream=stream,
    )
    caches = kv_cache.allocate(
        kv_cache.model_layers(resolved.model),
        resolved.dtype,
        num_blocks=resolved.num_blocks,
        block_size=sizes.block_size,
        device=resolved.device,
    )
    runner = ModelRunner(
        resolved, weights, caches, capture=config.capture, state=state, stream=stream
    )
    return state, runner


def _check_proposer(proposer: Proposer | None, config: EngineConfig) -> None:
    """Refuse one that was handed in and cannot draft asynchronously; others were by `resolve`."""
    if config.async_steps and proposer is not None and needs_tokens(proposer):
        raise ValueError(
            f"async_steps={config.async_steps}: proposer {proposer.name!r} does not say that it "
            "can draft before the host has seen the last step; use async_steps=0"
        )


def _capture(
    runner: ModelRunner,
    proposer: Proposer | None,
    progress: StartProgress | None,
    times: StartTimes,
) -> None:
    """Capture the whole table, and the proposer's drafts over it where it has graphs."""
    with times.phase("capture"):
        runner.capture(
            None if progress is None else lambda *done: progress("capture", *done),
            proposer if proposer is not None and proposer.graph_safe else None,
        )
        if runner.compiler.events:
            times.cached["capture"] = all(event.cache_hit for event in runner.compiler.events)


def _make_proposer(resolved: ResolvedConfig, runner: ModelRunner) -> Proposer | None:
    """The proposer that the configuration names, its weights read; None where nobody drafts."""
    speculative = resolved.speculative
    if speculative is None:
        return None
    if resolved.draft is None:
        runtime = EngineRuntime.of(resolved)
        return registry.create(speculative.method, dict(speculative.options), runtime)
    caches = kv_cache.allocate(
        resolved.draft.kv_layers,
        resolved.dtype,
        num_blocks=resolved.num_blocks,
        block_size=resolved.sizes.block_size,
        device=resolved.device,
    )
    built = resolved.draft.build(EngineDraftRuntime(resolved, runner, caches))
    proposer = registry.checked(built, registry.find(speculative.method))
    if speculative.override is None:
        return proposer
    return registry.overridden(
        proposer,
        speculative.override,
        min_match=speculative.override_min_match,
        runtime=EngineRuntime.of(resolved),
    )


def _check_numerics(runner: ModelRunner, config: EngineConfig, times: StartTimes) -> None:
    """Probe every piece of the step, or say that nobody has."""
    if config.numerics == "fast":
        logger.warning(
            "numerics='fast': nothing shows that a row's logits depend on its request alone, so a "
            "stream may change with what shares its steps, speculation included"
        )
        return
    with times.phase("numerics"):
        report = check_row_invariance(
            runner.decoder,
            runner.opset,
            runner.verifier_shape,
            row_counts=runner.row_counts,
            max_model_len=runner.sizes.max_model_len,
        )
        times.cached["numerics"] = report.cached


def make_stream(device: torch.device, async_steps: int) -> Stream:
    """Where steps run: at once, or behind the host's back."""
    if device.type == "cuda":
        return CudaStream(device)
    return ThreadStream() if async_steps else InlineStream()


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
