"""Capture manager: captures the step for every cell of the table, dispatches batches to cells,
replays, counts.

Owns the captured graphs and their counters. Sees the step as a callable over static buffers and a
proposer as a small `Capturable`; never heard of tokens, KV or requests.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from capture.buffers import StaticBuffers
from capture.config import CaptureConfig
from capture.graph import CompiledGraph, EagerGraph, Graph, StepFn
from capture.shapes import ShapeKey, ShapeTable
from capture.tape import ProgramRunner, TapeGraph

# Fills a cell's input buffers with a plausible batch; the second argument picks one of two
# different batches.
PrepareFn = Callable[[ShapeKey, int], None]
ProgressFn = Callable[[int, int, str], None]


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

    replays: Counter[str] = field(default_factory=Counter)
    padding_rows: int = 0
    eager_fallbacks: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    num_bytes: dict[str, int] = field(default_factory=dict)


class CaptureManager:
    """See the module docstring.

    Args:
        table: the cells.
        buffers: the static storages that all cells share.
        config: graph kind, laziness, budget.
        fn, prepare: the step and the filler of its inputs.
        run_program: native loop for `TapeGraph`.

    Raises:
        ValueError: a graph kind that the device cannot run, or a memory budget below the need.
    """

    def __init__(
        self,
        table: ShapeTable,
        buffers: StaticBuffers,
        config: CaptureConfig,
        *,
        fn: StepFn,
        prepare: PrepareFn,
        run_program: ProgramRunner,
    ) -> None:
        self.table = table
        self.buffers = buffers
        self.config = config
        self.kind = resolve_graph_kind(config, buffers.device)
        self.stats = CaptureStats()
        self._fn = fn
        self._prepare = prepare
        self._run_program = run_program
        self._graphs: dict[ShapeKey, Graph] = {}
        self._closed = False

    def capture_all(self, progress: ProgressFn | None = None) -> None:
        """Capture every cell, largest first; with `lazy`, only warm the smallest one up.

        Raises:
            ValueError: more bytes than the memory budget.
            CaptureError: the step breaks the capture contract.
        """
        self._check_budget()
        keys = list(self.table)
        if self.config.lazy:
            self._warm_up(keys[-1])
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
        return self.table.dispatch(num_reqs, num_draft_tokens, tier)

    def replay(self, key: ShapeKey, *, num_reqs: int) -> None:
        """Replay a cell whose inputs are in place; `num_reqs` of its request rows are live."""
        assert 1 <= num_reqs <= key.num_reqs, f"{num_reqs} live requests in cell {key}"
        graph = self._graphs.get(key)
        if graph is None:
            assert not self._closed, f"cell {key} is replayed after close()"
            assert self.config.lazy, f"cell {key} was not captured"
            graph = self._capture_late(key)
        graph.replay()
        self.stats.replays[str(key)] += 1
        self.stats.padding_rows += (key.num_reqs - num_reqs) * key.query_len

    def count_eager(self, reason: str) -> None:
        """Count work that ran outside a captured graph, by a named reason."""
        self.stats.eager_fallbacks[reason] += 1

    def close(self) -> None:
        """Free the graphs; the manager cannot replay any more."""
        self._closed = True
        self._graphs.clear()

    def _capture_late(self, key: ShapeKey) -> Graph:
        """First use of a cell in lazy mode: the batch's inputs are in place and must survive."""
        inputs = self.buffers.snapshot(("input",))
        graph = self._capture(key)
        self.buffers.restore(inputs)
        return graph

    def _capture(self, key: ShapeKey) -> Graph:
        start = time.perf_counter()
        self._warm_up(key)
        graph = self._make_graph(key)
        self.stats.num_bytes[str(key)] = graph.num_bytes
        self._check_budget()
        self._graphs[key] = graph
        self.stats.seconds[str(key)] = time.perf_counter() - start
        return graph

    def _warm_up(self, key: ShapeKey) -> None:
        self._prepare(key, 0)
        self._fn(self.buffers.cell(key))

    def _make_graph(self, key: ShapeKey) -> Graph:
        if self.kind == "eager":
            return EagerGraph(self._fn, self.buffers, key)
        if self.kind == "compiled":
            return CompiledGraph(self._fn, self.buffers, key)
        return TapeGraph(
            self._fn,
            self.buffers,
            key,
            prepare=lambda variant: self._prepare(key, variant),
            run_program=self._run_program,
            debug=self.config.debug,
        )

    def _check_budget(self) -> None:
        graphs = sum(self.stats.num_bytes.values())
        check_memory_budget(self.config, self.buffers.num_bytes, graphs)

    def report(self) -> str:
        """The table as captured: one line a cell with seconds and bytes, and the totals."""
        lines = [f"graph kind {self.kind}, {len(self._graphs)} of {len(self.table)} cells captured"]
        lines.append(f"{'cell':>16} {'seconds':>9} {'bytes':>10} {'replays':>8}")
        for key in self.table:
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
    """Hold the need to the budget; with `required_bytes`, before anything is allocated.

    Raises:
        ValueError: the need is above it.
    """
    budget = config.memory_budget
    if budget is not None and buffer_bytes + graph_bytes > budget:
        raise ValueError(
            f"CaptureConfig.memory_budget={budget}: static buffers need {buffer_bytes} bytes, "
            f"graphs {graph_bytes} so far; raise it, or lower max_num_seqs or max_draft_tokens"
        )


def resolve_graph_kind(config: CaptureConfig, device: torch.device) -> str:
    """The launcher that `config.graph` means on this device.

    Raises:
        ValueError: `cuda` where it cannot run.
    """
    if config.graph == "cuda":
        raise ValueError(
            f"CaptureConfig.graph='cuda': not available on device {device}; use auto, tape, "
            "compiled or eager"
        )
    return "tape" if config.graph == "auto" else config.graph
