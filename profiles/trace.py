"""From a list of events to a table of what a step costs, phase by phase. Pure; knows no profiler.

Owns the events that torch_trace.py and nsys_table.py make of their files, and the rules: a host
event belongs to the innermost range around it on its thread; work of the device to the range that
launched it; the device is idle where nothing of it runs. Where a trace has no device (CPU) the
launches are the device's work: what lies between them is the host's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from statistics import fmean, median
from typing import Any, Final, Literal

from graphengine.tracing import PHASES, STEP

Kind = Literal[
    "range",  # a phase, on the host
    "op",  # a call of a torch op, on the host
    "launch",  # the host puts one kernel on the device; on CPU it calls it
    "graph_launch",  # the host puts a whole graph there
    "sync",  # the host waits for the device
    "call",  # any other call of the CUDA API: what it starts belongs to its phase
    "kernel",  # work of the device; what a profiler shows of a graph as a whole is one
    "copy",  # a copy or fill, by the device
]
DEVICE: Final = ("kernel", "copy")
LAUNCHES: Final = ("launch", "graph_launch")
BETWEEN: Final = "between phases"
OUTSIDE: Final = "outside steps"
Span = tuple[float, float]

_LAUNCH_CALLS = ("LaunchKernel", "LaunchCooperativeKernel")


@dataclass(frozen=True, slots=True)
class Event:
    """Something with a beginning and an end, in microseconds on one clock."""

    name: str
    start: float
    end: float
    lane: str  # thread of the host, or stream of the device
    kind: Kind
    correlation: int | None = None  # the same for a launch and what it launched


@dataclass(slots=True)
class Row:
    """What a phase costs in a step: counts, the mean of all steps, and microseconds, the median."""

    phase: str
    launches: float = 0
    graph_launches: float = 0
    ops: float = 0  # torch ops that no other op and no launch called
    kernels: float = 0
    copies: float = 0
    syncs: float = 0
    host_us: float = 0  # in this phase and in none inside it, waiting included
    wait_us: float = 0  # of it, in syncs
    device_us: float = 0  # sum over what the phase launched
    idle_us: float = 0  # of host_us, while nothing ran on the device


@dataclass(frozen=True, slots=True)
class Table:
    """One row a phase, the whole step, and the device's gaps."""

    num_steps: int
    rows: list[Row]  # their medians need not add up to the median step
    total: Row
    gaps: float  # stretches of a step in which nothing ran on the device
    longest_gap_us: float

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def call_kind(name: str) -> Kind:
    """What a call of the CUDA runtime or driver does to a step."""
    if "GraphLaunch" in name:
        return "graph_launch"
    if any(one in name for one in _LAUNCH_CALLS):
        return "launch"
    blocking = "Memcpy" in name and "Async" not in name
    return "sync" if blocking or "Synchronize" in name else "call"


def tabulate(events: Iterable[Event]) -> Table:
    """The table of the steps in a trace.

    Raises:
        ValueError: the trace has no range of a step, so that nothing can be told by step.
    """
    by_kind: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_kind[event.kind].append(event)
    steps = sorted((one.start, one.end) for one in by_kind["range"] if one.name == STEP)
    if not steps:
        raise ValueError(f"the trace has no range named {STEP!r}: switch graphengine.tracing on")
    phases = _Phases(by_kind["range"], [start for start, _ in steps])
    rows = {name: [Row(name) for _ in steps] for name in (*PHASES, BETWEEN, OUTSIDE)}

    def row(place: tuple[str, int]) -> Row:
        return rows[place[0]][place[1]]

    launches = _outermost([one for kind in LAUNCHES for one in by_kind[kind]])
    device = [one for kind in DEVICE for one in by_kind[kind]]
    busy = _union([(one.start, one.end) for one in device or launches])
    for event in launches:
        found = row(phases.at(event))
        found.launches += event.kind == "launch"
        found.graph_launches += event.kind == "graph_launch"
        found.device_us += 0 if device else event.end - event.start
    for event in _outermost(by_kind["op"], inside=launches):
        row(phases.at(event)).ops += 1
    for event in _outermost(by_kind["sync"]):
        found = row(phases.at(event))
        found.syncs += 1
        found.wait_us += event.end - event.start
    calls = [one for kind in (*LAUNCHES, "sync", "call") for one in by_kind[kind]]
    owners = {one.correlation: phases.at(one) for one in calls if one.correlation is not None}
    for event in device:
        found = row(owners.get(event.correlation) or (OUTSIDE, phases.step_of(event.start)))
        found.kernels += event.kind == "kernel"
        found.copies += event.kind == "copy"
        found.device_us += event.end - event.start
    covered = _Cover(busy)
    for start, end, name in phases.stretches():
        found = row((name, phases.step_of(start)))
        found.host_us += end - start
        found.idle_us += end - start - covered.between(start, end)
    return _summed(rows, [_holes(step, busy) for step in steps])


def _summed(rows: dict[str, list[Row]], gaps: Sequence[Sequence[float]]) -> Table:
    """Over the steps: a row of each phase that has anything, and one of their sums."""

    def over_steps(phase: str, values: dict[str, list[float]]) -> Row:
        return Row(
            phase,
            **{
                name: median(found) if name.endswith("_us") else fmean(found)
                for name, found in values.items()
            },
        )

    def values(of: Sequence[Row]) -> dict[str, list[float]]:
        return {name: [getattr(one, name) for one in of] for name in _NUMBERS}

    by_phase = {phase: values(found) for phase, found in rows.items()}
    sums = {
        name: [sum(step) for step in zip(*(one[name] for one in by_phase.values()), strict=True)]
        for name in _NUMBERS
    }
    used = {phase: one for phase, one in by_phase.items() if any(map(any, one.values()))}
    return Table(
        num_steps=len(gaps),
        rows=[over_steps(phase, one) for phase, one in used.items()],
        total=over_steps("step", sums),
        gaps=fmean(map(len, gaps)),
        longest_gap_us=median(max(one, default=0.0) for one in gaps),
    )


_NUMBERS = [field.name for field in fields(Row) if field.name != "phase"]


class _Phases:
    """Which phase, of which step, a moment of a thread belongs to."""

    def __init__(self, ranges: Sequence[Event], step_starts: Sequence[float]) -> None:
        lanes: dict[str, list[Event]] = defaultdict(list)
        for one in ranges:
            lanes[one.lane].append(one)
        self._steps = step_starts
        self._lanes = {lane: _flatten(found) for lane, found in lanes.items()}
        self._starts = {lane: [one[0] for one in found] for lane, found in self._lanes.items()}

    def at(self, event: Event) -> tuple[str, int]:
        """The phase in which a host event begins, and the number of the step."""
        index = bisect_right(self._starts.get(event.lane, []), event.start) - 1
        name = OUTSIDE
        if index >= 0:
            _, end, phase = self._lanes[event.lane][index]
            name = phase if event.start < end else OUTSIDE
        return name, self.step_of(event.start)

    def step_of(self, moment: float) -> int:
        """Number of the step that has begun last; of the first, before any has."""
        return max(0, bisect_right(self._steps, moment) - 1)

    def stretches(self) -> list[tuple[float, float, str]]:
        """All stretches of all threads."""
        return [one for found in self._lanes.values() for one in found]


def _flatten(ranges: Iterable[Event]) -> list[tuple[float, float, str]]:
    """Nested ranges of a thread as stretches side by side, each of the innermost one's name."""
    stretches: list[tuple[float, float, str]] = []
    open_ranges: list[tuple[float, str]] = []  # end, name
    now = 0.0

    def go_to(moment: float) -> None:
        nonlocal now
        if open_ranges and moment > now:
            stretches.append((now, moment, open_ranges[-1][1]))
        now = moment

    def close(until: float) -> None:
        while open_ranges and open_ranges[-1][0] <= until:
            go_to(open_ranges[-1][0])
            open_ranges.pop()

    for one in sorted(ranges, key=lambda one: (one.start, -one.end)):
        close(one.start)
        go_to(one.start)
        end = min(one.end, open_ranges[-1][0]) if open_ranges else one.end
        open_ranges.append((end, BETWEEN if one.name == STEP else one.name))
    close(float("inf"))
    return stretches


def _outermost(events: Iterable[Event], inside: Sequence[Event] = ()) -> list[Event]:
    """Those that lie in no other of their thread: a call that is made of calls is one.

    Args:
        inside: others in which they may not lie either.
    """
    kept, ends = [], dict[str, float]()
    marked = [(one, False) for one in inside] + [(one, True) for one in events]
    for event, counts in sorted(marked, key=lambda one: (one[0].start, -one[0].end, one[1])):
        if event.start >= ends.get(event.lane, float("-inf")):
            ends[event.lane] = event.end
            if counts:
                kept.append(event)
    return kept


def _union(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


class _Cover:
    """How much of a stretch disjoint sorted spans cover."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._starts = [start for start, _ in spans]
        self._before = [0.0, *accumulate(end - start for start, end in spans)]

    def between(self, start: float, end: float) -> float:
        return self._until(end) - self._until(start)

    def _until(self, moment: float) -> float:
        index = bisect_right(self._starts, moment)
        over = max(0.0, self._spans[index - 1][1] - moment) if index else 0.0
        return self._before[index] - over


def _holes(step: Span, busy: Sequence[Span]) -> list[float]:
    """Lengths of the stretches of a step that no busy span covers."""
    now, holes = step[0], []
    for start, end in busy:
        if end <= step[0] or start >= step[1]:
            continue
        if start > now:
            holes.append(start - now)
        now = max(now, end)
    if now < step[1]:
        holes.append(step[1] - now)
    return holes


COLUMNS: Final = (
    ("launches", "launches", ".0f"),
    ("graph_launches", "graphs", ".0f"),
    ("ops", "torch ops", ".0f"),
    ("kernels", "kernels", ".0f"),
    ("copies", "copies", ".0f"),
    ("syncs", "syncs", ".0f"),
    ("host_us", "host, us", ",.0f"),
    ("wait_us", "waiting, us", ",.0f"),
    ("device_us", "device, us", ",.0f"),
    ("idle_us", "idle, us", ",.0f"),
)


def markdown(table: Table) -> str:
    """The table, its total last, and a line on the gaps."""
    header = f"| phase | {' | '.join(title for _, title, _ in COLUMNS)} |"
    lines = [header, "|---" * (len(COLUMNS) + 1) + "|"]
    for row in (*table.rows, table.total):
        values = (format(getattr(row, name), form) for name, _, form in COLUMNS)
        lines.append(f"| {row.phase} | {' | '.join(values)} |")
    lines.append(
        f"\n{table.num_steps} steps: means of counts, medians of times. {table.gaps:.1f} gaps a "
        f"step, the longest {table.longest_gap_us:,.0f} us."
    )
    return "\n".join(lines)
