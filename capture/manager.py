"""Capture manager: captures the step for every cell of the table, dispatches batches to cells,
replays, counts.

Owns the captured graphs and their counters. Sees the step as a callable over static buffers and a
proposer as a small `Capturable`; never heard of tokens, KV or requests.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median_low
from typing import Final, Protocol

import torch

from capture.buffers import StaticBuffers
from capture.config import CaptureConfig
from capture.cuda import CudaGraph, CudaStream
from capture.graph import CompiledGraph, EagerGraph, Graph, StepFn
from capture.shapes import ShapeKey, ShapeTable
from capture.stream import Stream
from capture.tape import ProgramRunner, TapeGraph

# Fills a cell's input buffers with a plausible batch; the second argument picks one of two
# different batches.
PrepareFn = Callable[[ShapeKey, int], None]
ProgressFn = Callable[[int, int, str], None]

OVER_BUDGET = "capture:memory_budget"  # launches of lazy cells that did not fit
MOST_TURNS: Final = 5  # replays of a cell, whose median is its time
TIMED_SECONDS: Final = 0.1  # after which two are enough
logger = logging.getLogger(__name__)


class MemoryBudgetError(ValueError):
    """More bytes than `CaptureConfig.memory_budget`."""


class Capturable(Protocol):
    """What the manager sees of a proposer."""

    @property
    def name(self) -> str:
        """For messages and counters."""

    @property
    def graph_safe(self) -> bool:
        """Whether it can be captured at all."""

    def capture(self, manager: CaptureManager) -> None:
        """Capture its own graphs over the manager's table."""


@dataclass(slots=True)
class CaptureStats:
    """Counters since start; keys are `str(ShapeKey)` or a named reason."""

    replays: Counter[str] = field(default_factory=Counter)  # launches, of whatever graph kind
    padding_rows: int = 0  # rows of launched cells that carried no token
    eager_fallbacks: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    num_bytes: dict[str, int] = field(default_factory=dict)
    # median seconds of a replay, where cells are timed
    replay_seconds: dict[str, float] = field(default_factory=dict)

    def forget_runs(self) -> None:
        """Count launches from zero again; what was captured stays."""
        self.replays.clear()
        self.eager_fallbacks.clear()
        self.padding_rows = 0


@dataclass(frozen=True, slots=True)
class _Tier:
    """What the cells of a tier run, what fills their inputs, and how many rows one has."""

    step: StepFn
    prepare: PrepareFn
    num_rows: Callable[[ShapeKey], int] = lambda key: key.num_tokens


class CaptureManager:
    """See the module docstring.

    Args:
        table: the cells.
        buffers: the static storages that all cells share.
        config: graph kind, laziness, budget.
        steps: what a cell runs, by tier.
        prepare: the filler of a cell's inputs.
        run_program: native loop for `TapeGraph`.
        stream: where graphs are replayed.

    Raises:
        ValueError: a graph kind that the device cannot run, or a memory budget below the need.
    """

    def __init__(
        self,
        table: ShapeTable,
        buffers: StaticBuffers,
        config: CaptureConfig,
        *,
        steps: Mapping[str, StepFn],
        prepare: PrepareFn,
        run_program: ProgramRunner,
        stream: Stream,
    ) -> None:
        self.table = table
        self.buffers = buffers
        self.config = config
        self.kind = resolve_graph_kind(config, buffers.device)
        self.stats = CaptureStats()
        self._tiers = {tier: _Tier(step, prepare) for tier, step in steps.items()}
        self._run_program = run_program
        self._stream = stream
        self._cells: list[ShapeKey] = []  # all that can be replayed, largest first by tier
        self._graphs: dict[ShapeKey, Graph] = {}
        self._over_budget: set[ShapeKey] = set()
        self._progress: ProgressFn | None = None
        self._draft_tiers: list[str] = []
        self._closed = False

    def capture_all(self, progress: ProgressFn | None = None) -> None:
        """Warm the step up, then capture every cell, largest first; with `lazy`, none yet.

        Raises:
            ValueError: more bytes than the memory budget.
            CaptureError: the step breaks the capture contract.
        """
        self._check_budget()
        self._progress = progress  # for what is captured behind it, too
        self._capture_cells(list(self.table), progress)

    def capture_tier(
        self,
        tier: str,
        step: StepFn,
        prepare: PrepareFn,
        *,
        num_rows: Callable[[ShapeKey], int],
    ) -> None:
        """Capture one more step over the table's cells that have drafts; for proposers.

        Args:
            tier: a name of its own.
            step, prepare: as the target's.
            num_rows: rows that a cell runs, for the count of padding.

        Raises:
            ValueError, CaptureError: as `capture_all`.
        """
        assert tier not in self._tiers, f"tier {tier} is captured already"
        self._tiers[tier] = _Tier(step, prepare, num_rows)
        self._draft_tiers.append(tier)
        self._capture_cells(self.table.draft_cells(tier), self._progress)

    def _capture_cells(self, keys: Sequence[ShapeKey], progress: ProgressFn | None) -> None:
        for key in warm_up_cells(keys):
            tier = self._tiers[key.tier]
            tier.prepare(key, 0)
            views = self.buffers.cell(key)
            self._stream.run(partial(tier.step, views))
        self._stream.synchronize()
        self._cells.extend(keys)
        if self.config.lazy:
            return
        for index, key in enumerate(keys):
            if progress is not None:
                progress(index, len(keys), str(key))
            self._capture(key)
        if progress is not None:
            progress(len(keys), len(keys), "captured")

    def capture_proposer(self, proposer: Capturable) -> None:
        """Capture a proposer's graphs after the target's.

        Raises:
            ValueError: the proposer is not graph-safe.
        """
        if not proposer.graph_safe:
            raise ValueError(
                f"proposer {proposer.name!r} is graph_safe=False and cannot be captured: "
                "run it eagerly beside the captured target"
            )
        proposer.capture(self)

    def dispatch(self, num_reqs: int, num_draft_tokens: int, tier: str) -> ShapeKey:
        """The smallest cell of a captured tier that holds such a batch."""
        assert tier in self._tiers, f"tier {tier!r} is not captured: {sorted(self._tiers)}"
        return self.table.dispatch(num_reqs, num_draft_tokens, tier)

    def make_ready(self, key: ShapeKey) -> None:
        """Capture a cell that is still to be; before its inputs are written and planned for."""
        if key not in self._graphs and self.config.lazy and not self._closed:
            self._capture_late(key)

    def replay(self, key: ShapeKey, *, num_reqs: int, num_tokens: int) -> None:
        """Replay a cell whose inputs are in place, or on their way in the same stream.

        Args:
            key: the cell.
            num_reqs: live requests, of the cell's `num_reqs`.
            num_tokens: rows that carry a token, of all that the cell has. The others are padding:
                those of requests that are not there, and tails behind a request's own drafts.
        """
        assert 1 <= num_reqs <= key.num_reqs, f"{num_reqs} live requests in cell {key}"
        num_rows = self._tiers[key.tier].num_rows(key)
        assert 1 <= num_tokens <= num_reqs * (num_rows // key.num_reqs), (
            f"{num_tokens} live rows of {num_reqs} requests in cell {key}"
        )
        graph = self._graphs.get(key)
        if graph is None:
            assert not self._closed, f"cell {key} is replayed after close()"
            assert self.config.lazy, f"cell {key} was not captured"
            graph = self._capture_late(key)
        self._stream.run(graph.replay)
        self.stats.replays[str(key)] += 1
        self.stats.padding_rows += num_rows - num_tokens
        if key in self._over_budget:
            self.count_eager(OVER_BUDGET)

    def time_cells(self) -> None:
        """Time a replay of every cell, the proposer's too; none with `lazy`, but on first request.

        What `stats` has already stays.
        """
        if not self.config.lazy:
            self._time(self._cells)

    def replay_seconds(self, key: ShapeKey) -> float:
        """Median seconds of a replay of a cell over a plausible batch of short requests."""
        if str(key) not in self.stats.replay_seconds:
            self.make_ready(key)
            self._time([key])
        return self.stats.replay_seconds[str(key)]

    def draft_seconds(self, num_reqs: int, num_draft_tokens: int) -> float:
        """The same of what a proposer has captured for such a batch; 0.0 where there is nothing."""
        if num_draft_tokens == 0:
            return 0.0
        keys = (self.dispatch(num_reqs, num_draft_tokens, tier) for tier in self._draft_tiers)
        return sum(map(self.replay_seconds, keys))

    def _time(self, keys: Iterable[ShapeKey]) -> None:
        """Replay cells a few times, not counted; the host's part of waiting is in it."""
        seconds, stream = self.stats.replay_seconds, self._stream
        with self._aside():
            for key in keys:
                if str(key) in seconds:
                    continue
                turns: list[float] = []
                while len(turns) < 2 or (len(turns) < MOST_TURNS and sum(turns) < TIMED_SECONDS):
                    self._tiers[key.tier].prepare(key, 1)  # a replay may use its inputs up
                    stream.synchronize()
                    start = time.perf_counter()
                    stream.run(self._graphs[key].replay)
                    stream.synchronize()
                    turns.append(time.perf_counter() - start)
                seconds[str(key)] = median_low(turns)

    def count_eager(self, reason: str) -> None:
        """Count work that ran outside a captured graph, by a named reason."""
        self.stats.eager_fallbacks[reason] += 1

    def close(self) -> None:
        """Free the graphs; the manager cannot replay any more."""
        self._closed = True
        self._graphs.clear()

    def _capture_late(self, key: ShapeKey) -> Graph:
        """First use of a cell in lazy mode. What is there must survive: inputs, and outputs that
        are still to be read, as are the logits between the two halves of a step.

        Where the cell does not fit the memory budget any more, its step is called as it is.
        """
        with self._aside():
            try:
                return self._capture(key)
            except MemoryBudgetError as error:
                logger.warning("cell %s runs uncaptured: %s", key, error)
                self._over_budget.add(key)
                self._graphs[key] = EagerGraph(self._tiers[key.tier].step, self.buffers, key)
                return self._graphs[key]

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Around runs of a cell that are no step of anybody's: inputs and outputs are kept."""
        self._stream.synchronize()
        kept = self.buffers.snapshot(("input", "output"))
        try:
            yield
        finally:
            self.buffers.restore(kept)

    def _capture(self, key: ShapeKey) -> Graph:
        start = time.perf_counter()
        graph = self._make_graph(key)
        self._check_budget(key, graph.num_bytes)
        self._graphs[key] = graph
        self.stats.num_bytes[str(key)] = graph.num_bytes
        self.stats.seconds[str(key)] = time.perf_counter() - start
        return graph

    def _make_graph(self, key: ShapeKey) -> Graph:
        tier = self._tiers[key.tier]
        if self.kind == "eager":
            return EagerGraph(tier.step, self.buffers, key)
        if self.kind == "compiled":
            return CompiledGraph(tier.step, self.buffers, key)
        if self.kind == "cuda":
            assert isinstance(self._stream, CudaStream), f"CUDA graphs in {self._stream!r}"
            return CudaGraph(
                tier.step,
                self.buffers,
                key,
                prepare=lambda variant: tier.prepare(key, variant),
                stream=self._stream,
                debug=self.config.debug,
            )
        return TapeGraph(
            tier.step,
            self.buffers,
            key,
            prepare=lambda variant: tier.prepare(key, variant),
            run_program=self._run_program,
            debug=self.config.debug,
        )

    def _check_budget(self, key: ShapeKey | None = None, num_bytes: int = 0) -> None:
        """Hold what is captured, with a graph of `num_bytes` for `key`, to the budget."""
        others = sum(n for name, n in self.stats.num_bytes.items() if name != str(key))
        check_memory_budget(self.config, self.buffers.num_bytes, others + num_bytes)

    def report(self) -> str:
        """The table as captured: one line a cell with seconds and bytes, and the totals."""
        captured = f"{len(self.stats.seconds)} of {len(self._cells)} cells captured"
        lines = [f"graph kind {self.kind}, {captured}"]
        lines.append(f"{'cell':>16} {'seconds':>9} {'bytes':>10} {'replays':>8}")
        for key in self._cells:
            name = str(key)
            seconds = self.stats.seconds.get(name)
            took = f"{seconds:9.3f}" if seconds is not None else f"{'-':>9}"
            lines.append(
                f"{name:>16} {took} {self.stats.num_bytes.get(name, 0):>10} "
                f"{self.stats.replays[name]:>8}"
            )
        lines.append(
            f"static buffers {self.buffers.num_bytes} bytes, capture "
            f"{sum(self.stats.seconds.values()):.2f} s"
        )
        return "\n".join(lines)


def check_memory_budget(config: CaptureConfig, buffer_bytes: int, graph_bytes: int = 0) -> None:
    """Hold the need to the budget; with buffers on the meta device, before anything is allocated.

    Raises:
        MemoryBudgetError: the need is above it.
    """
    budget = config.memory_budget
    if budget is not None and buffer_bytes + graph_bytes > budget:
        raise MemoryBudgetError(
            f"CaptureConfig.memory_budget={budget}: static buffers need {buffer_bytes} bytes, "
            f"graphs {graph_bytes} so far; raise it, or lower max_num_seqs or max_draft_tokens"
        )


def warm_up_cells(keys: Sequence[ShapeKey]) -> list[ShapeKey]:
    """Of the table's cells, those whose run compiles every piece for all of them.

    Pieces are compiled for one row, and once for any number of more; tiers have their own.
    """
    cells: dict[tuple[str, bool], ShapeKey] = {}
    for key in sorted(keys, key=lambda key: key.num_tokens):
        cells.setdefault((key.tier, key.num_tokens > 1), key)
    return list(cells.values())


def resolve_graph_kind(config: CaptureConfig, device: torch.device) -> str:
    """The launcher that `config.graph` means on this device.

    Raises:
        ValueError: `cuda` where it cannot run.
    """
    if config.graph == "cuda" and device.type != "cuda":
        raise ValueError(
            f"CaptureConfig.graph='cuda': not available on device {device}; use auto, tape, "
            "compiled or eager"
        )
    if config.graph == "auto":
        return "cuda" if device.type == "cuda" else "tape"
    return config.graph
