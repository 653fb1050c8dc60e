"""`graphengine capture-plan` and `graphengine proposers`: what would be captured, what could draft.

Owns two dry listings. Reads a checkpoint's headers and the registry; loads no weight, allocates no
buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from rich.table import Table

from capture.buffers import StaticBuffers
from capture.manager import check_memory_budget, resolve_graph_kind
from capture.shapes import ShapeKey
from graphengine.captured_step import buffer_specs, make_buffers
from graphengine.cli.console import stdout
from graphengine.cli.options import EngineOptions, Model, command
from graphengine.memory import MemoryPlan, available_bytes, plan_memory
from graphengine.models.loader import open_model
from graphengine.models.locate import DEMO_MODEL
from graphengine.resolve import ResolvedConfig, resolve
from proposers import ProposerInfo, registry
from proposers.device import DRAFT_TIER


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedBytes:
    """Estimated bytes of an engine, by part."""

    buffers: dict[str, int]  # by buffer
    cells: dict[ShapeKey, int]  # of a cell's views; the cells share the buffers
    memory: MemoryPlan


def plan_bytes(resolved: ResolvedConfig) -> PlannedBytes:
    """Sizes as the runner would allocate them, without allocating."""
    draft = resolved.draft
    buffers = make_buffers(resolved.model, resolved.sizes, torch.device("meta"), draft)
    sizes = {name: buffers.whole(name).nbytes for name in buffers.specs}
    cells = {key: _view_bytes(buffers, key) for key in planned_cells(resolved)}
    return PlannedBytes(buffers=sizes, cells=cells, memory=plan_memory(resolved))


def planned_cells(resolved: ResolvedConfig) -> list[ShapeKey]:
    """Every cell that a start captures, in order: the target's, then those of drafts."""
    drafts = resolved.table.draft_cells(DRAFT_TIER) if resolved.draft is not None else []
    return [*resolved.table, *drafts]


def _view_bytes(buffers: StaticBuffers, key: ShapeKey) -> int:
    return sum(view.nbytes for view in buffers.cell(key).values())


@command
def capture_plan(*, model: Model = DEMO_MODEL, options: EngineOptions) -> None:
    """Print the table of shapes that would be captured, with estimated bytes. Loads no weights.

    A table over its memory budget, or above the machine's memory, is printed, too, before it is
    refused as at a start.
    """
    config = options.config()
    opened = open_model(model)
    resolved = resolve(opened.config, config, opened)
    kind = resolve_graph_kind(config.capture, resolved.device)
    planned = plan_bytes(resolved)
    memory = planned.memory
    console = stdout()
    console.print(_cell_table(planned))
    console.print(_buffer_table(planned, resolved))
    sizes = resolved.sizes
    dtype = str(resolved.dtype).removeprefix("torch.")
    when = "on first use" if config.capture.lazy else "at start"
    console.print(
        f"{len(planned.cells)} cells, graph kind {kind}, captured {when}; "
        f"max_num_seqs {sizes.max_num_seqs}, max_draft_tokens {sizes.max_draft_tokens}, "
        f"max_model_len {sizes.max_model_len}",
        soft_wrap=True,
    )
    console.print(
        f"static buffers {_size(memory.buffers)}, KV cache {_size(memory.kv)} "
        f"({resolved.num_blocks} blocks of {sizes.block_size} tokens), scratch "
        f"{_size(memory.scratch)}, weights {_size(memory.weights)} ({dtype}), together "
        f"{_size(memory.total)}",
        soft_wrap=True,
    )
    check_memory_budget(config.capture, memory.buffers)
    memory.check(available_bytes(resolved.device))


def _cell_table(planned: PlannedBytes) -> Table:
    table = Table(title="cells, in the order of capture")
    for name in ("cell", "num_reqs", "k", "rows", "bytes of its views"):
        table.add_column(name, justify="right", no_wrap=True)
    for key, num_bytes in planned.cells.items():
        row = (str(key), str(key.num_reqs), str(key.query_len - 1), str(key.num_tokens))
        table.add_row(*row, f"{num_bytes:,}")
    return table


def _buffer_table(planned: PlannedBytes, resolved: ResolvedConfig) -> Table:
    more = resolved.draft.buffers if resolved.draft is not None else ()
    specs = {spec.name: spec for spec in (*buffer_specs(resolved.model, resolved.sizes), *more)}
    table = Table(title="static buffers, shared by all cells")
    for name in ("buffer", "written by", "shape", "dtype", "bytes"):
        table.add_column(name, justify="right" if name == "bytes" else "left", no_wrap=True)
    writers = {"input": "host", "scratch": "step", "output": "step, read by host"}
    for name, spec in specs.items():
        shape = f"[{', '.join(map(str, spec.shape))}]"
        dtype = str(spec.dtype).removeprefix("torch.")
        table.add_row(name, writers[spec.role], shape, dtype, f"{planned.buffers[name]:,}")
    return table


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.1f} MiB"


def proposers(
    testing: Annotated[
        bool, typer.Option("--testing", help="List the scripted ones for tests, too.")
    ] = False,
) -> None:
    """Print the support matrix of draft sources."""
    infos = registry.infos(testing=testing)
    console = stdout()
    served = [info for info in infos if info.status != "unsupported"]
    console.print(_served_table(served))
    console.print(_option_table(served))
    console.print(_unsupported_table([info for info in infos if info.status == "unsupported"]))


def _served_table(infos: Sequence[ProposerInfo]) -> Table:
    table = Table(title="draft sources")
    for name in ("method", "interface", "status", "runs"):
        table.add_column(name, no_wrap=True)
    table.add_column("needs", max_width=len("hidden states"))
    table.add_column("probs", no_wrap=True)
    table.add_column("what it is", ratio=1)
    for info in infos:
        needs = ["checkpoint"] if info.model == "required" else []
        needs += ["hidden states"] if info.needs_hidden_states else []
        table.add_row(
            info.name,
            info.interface,
            info.status,
            "captured" if info.graph_safe else f"on {info.kind}",
            ", ".join(needs),
            "yes" if info.produces_probs else "no",
            info.summary,
        )
    return table


def _option_table(infos: Sequence[ProposerInfo]) -> Table:
    table = Table(title="their options")
    for name in ("method", "option", "default"):
        table.add_column(name, no_wrap=True)
    table.add_column("what it is", ratio=1)
    for info in infos:
        for option in info.options:
            table.add_row(info.name, option.name, str(option.default), option.doc)
    return table


def _unsupported_table(infos: Sequence[ProposerInfo]) -> Table:
    table = Table(title="unsupported, and refused by name")
    for name in ("method", "what it is", "why not", "in its place"):
        table.add_column(name, no_wrap=name == "method")
    for info in infos:
        table.add_row(info.name, info.summary, info.reason, ", ".join(info.instead))
    return table
