"""What capturing a step saves: launches, host and device time, idle gaps; eager, compiled, graph.

Whole steps of the engine, on any device. Milliseconds come from runs without a profiler, in which
the modes take turns step by step; counts and the division by phases from torch.profiler, whose own
cost is in them. All modes must emit the same tokens, or nothing is written. Run with nothing else
running:

    python -m profiles.graph_vs_eager --out profiles/results/graph_vs_eager.json
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from graphengine.bench.environment import command_line, describe, describe_engine
from graphengine.bench.ratios import median_interval
from graphengine.bench.results_file import check_target, write_json
from graphengine.config import resolve_device
from graphengine.engine import Engine
from profiles.step_engine import add_arguments, check_running, fill, open_engine, streams
from profiles.timeline import draw
from profiles.torch_trace import profiled, programs_named
from profiles.trace import Event, Table, markdown, tabulate

EAGER: Final = "eager"
MODES: Final = {"cpu": (EAGER, "compiled", "tape"), "cuda": (EAGER, "compiled", "cuda")}
WARM_UP: Final = 3


def take_turns(engines: Mapping[str, Engine], turns: int) -> dict[str, list[float]]:
    """Seconds of each mode's step by turn, in random order within a turn."""
    seconds: dict[str, list[float]] = {mode: [] for mode in engines}
    order, draw_order = list(engines), random.Random(0)
    for _ in range(turns):
        draw_order.shuffle(order)
        for mode in order:
            start = time.perf_counter()
            engines[mode].step()
            seconds[mode].append(time.perf_counter() - start)
    return seconds


def trace_steps(engine: Engine, num_steps: int) -> list[Event]:
    """The events of so many steps; a profiler's first step, which sets it up, is thrown away."""

    def run(count: int) -> None:
        for _ in range(count):
            engine.step()

    device = engine.resolved.device
    profiled(lambda: run(1), device)
    return profiled(lambda: run(num_steps), device)


def check_same(engines: Mapping[str, Engine]) -> None:
    """RuntimeError where two modes have not emitted the same tokens."""
    first, *others = engines
    for mode in others:
        if streams(engines[mode]) != streams(engines[first]):
            raise RuntimeError(f"{mode} and {first} emitted different tokens: nothing to compare")


def summarise(
    shape: Mapping[str, int],
    seconds: Mapping[str, Sequence[float]],
    tables: Mapping[str, Table],
) -> list[dict[str, Any]]:
    """One row a mode: its step, its ratio to the first mode's step of the same turn, its table."""
    base = next(iter(seconds))
    rows = []
    for mode, values in seconds.items():
        ratios = [one / other for one, other in zip(values, seconds[base], strict=True)]
        rows.append(
            {
                **shape,
                "mode": mode,
                "step_us": 1e6 * median(values),
                "ratio_to": base,
                "ratio": asdict(median_interval(ratios)),
                "profile": tables[mode],
            }
        )
    return rows


HEADER: Final = (
    "batch", "k", "mode", "step, us", "ratio (95 %)", "launches", "graphs", "torch ops", "kernels",
    "copies", "syncs", "profiled step, us", "device, us", "idle, us", "gaps",
)  # fmt: skip


def line(row: Mapping[str, Any]) -> str:
    """A row of the first table."""
    table: Table = row["profile"]
    total, ratio = table.total, row["ratio"]
    counts = ("launches", "graph_launches", "ops", "kernels", "copies", "syncs")
    cells = [
        *(str(row[name]) for name in ("batch_size", "k", "mode")),
        f"{row['step_us']:,.0f}",
        f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})",
        *(f"{getattr(total, name):.0f}" for name in counts),
        *(f"{getattr(total, name):,.0f}" for name in ("host_us", "device_us", "idle_us")),
        f"{table.gaps:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def report(about: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """The markdown file: what was measured where, the first table, then phase by phase."""
    machine = about["machine"]
    before, after = (load[0] for load in (about["load_average_before"], machine["load_average"]))
    return "\n".join(
        [
            "# Graph against eager",
            "",
            f"`{shlex.join(about['command'])}`",
            "",
            f"{about['device']}, {machine['cpu']}, {machine['usable_cores']} cores, "
            f"{machine['threads']} threads, torch {about['versions']['torch']}, commit "
            f"{about['commit']}; load average {before:.1f} before and {after:.1f} at the end. "
            f"{about['note']}".rstrip(),
            "",
            "How to read it: `profiles/README.md`.",
            "",
            f"| {' | '.join(HEADER)} |",
            "|---" * len(HEADER) + "|",
            *map(line, rows),
            *(f"\n## {name_of(row)}\n\n{markdown(row['profile'])}" for row in rows),
            "",
        ]
    )


def name_of(row: Mapping[str, Any]) -> str:
    """What a row is of."""
    return f"batch {row['batch_size']}, k = {row['k']}, {row['mode']}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--modes", help="comma-separated; the first is what the others compare to")
    parser.add_argument("--batch", default="1,4", help="requests in a step, comma-separated")
    parser.add_argument("--k", default="0,3", help="drafts of each request, comma-separated")
    parser.add_argument("--turns", type=int, default=100, help="timed steps of each mode")
    parser.add_argument("--steps", type=int, default=10, help="profiled steps of each mode")
    parser.add_argument("--note", default="", help="what else a reader should know of the run")
    parser.add_argument("--out", type=Path, help="a JSON file; .md and .png are written beside it")
    args = parser.parse_args()
    args.modes = (args.modes or ",".join(MODES[resolve_device(args.device).type])).split(",")
    for name in ("batch", "k"):
        setattr(args, name, [int(part) for part in getattr(args, name).split(",")])
    if min(*args.batch, args.turns, args.steps) < 1 or min(args.k) < 0:
        parser.error("--batch, --turns and --steps must be at least 1, --k at least 0")
    return args


def measure(
    args: argparse.Namespace, engines: Mapping[str, Engine]
) -> tuple[list[dict[str, Any]], dict[str, list[Event]]]:
    """All shapes, each printed when it is done, and the traces of the first."""
    rows: list[dict[str, Any]] = []
    first: dict[str, list[Event]] = {}
    for batch_size, k in itertools.product(args.batch, args.k):
        for engine in engines.values():
            fill(engine, batch_size, k, args.context, WARM_UP)
        seconds = take_turns(engines, args.turns)
        traces = {mode: trace_steps(one, args.steps) for mode, one in engines.items()}
        for engine in engines.values():
            check_running(engine, batch_size)
        check_same(engines)
        first = first or traces
        tables = {mode: tabulate(events) for mode, events in traces.items()}
        rows += summarise({"batch_size": batch_size, "k": k}, seconds, tables)
        print("\n".join(line(row) for row in rows[-len(engines) :]), flush=True)
    return rows, first


def write(
    args: argparse.Namespace,
    engines: Mapping[str, Engine],
    rows: Sequence[dict[str, Any]],
    traces: Mapping[str, Sequence[Event]],
) -> None:
    """The three files; the picture is of the first shape."""
    about = {
        **describe(command_line("python", "-m", "profiles.graph_vs_eager")),
        "device": device_name(next(iter(engines.values())).resolved.device),
        "note": args.note,
        "load_average_before": args.load_average,
        "engines": {mode: describe_engine(one) for mode, one in engines.items()},
        "context": args.context,
    }
    plain = [{**row, "profile": row["profile"].as_dict()} for row in rows]
    write_json(args.out, {**about, "rows": plain})
    args.out.with_suffix(".md").write_text(report(about, rows), encoding="utf-8")
    shown = rows[: len(traces)]
    panels = {
        f"{row['mode']}; without the profiler {row['step_us'] / 1e3:.2f} ms": traces[row["mode"]]
        for row in shown
    }
    shape = name_of(shown[0]).rpartition(",")[0]
    draw(panels, f"One step of {args.model}, {shape}", args.out.with_suffix(".png"))


def main() -> int:
    args = parse()
    if args.out is not None:
        check_target(args.out)
    args.load_average = list(os.getloadavg())
    num_steps = WARM_UP + args.turns + args.steps + 1
    with ExitStack() as stack:
        if "tape" in args.modes:
            stack.enter_context(programs_named())
        engines: dict[str, Engine] = {}
        for mode in args.modes:
            engines[mode] = open_engine(args, mode, args.batch, args.k, num_steps)
            stack.callback(engines[mode].close)
        print(f"| {' | '.join(HEADER)} |\n{'|---' * len(HEADER)}|", flush=True)
        rows, traces = measure(args, engines)
        if args.out is not None:
            write(args, engines, rows, traces)
    return 0


def device_name(device: torch.device) -> str:
    """What a reader knows the device by."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


if __name__ == "__main__":
    sys.exit(main())
