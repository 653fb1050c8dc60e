"""The table of a trace: who owns an event, what the device's idle time is, and real traces."""

import json
from pathlib import Path
from typing import Any

import pytest

from graphengine.tracing import COMMIT, PLAN, STEP, VERIFY
from profiles.timeline import bars, median_step
from profiles.torch_trace import read_events
from profiles.trace import BETWEEN, OUTSIDE, Event, Kind, Row, Table, call_kind, markdown, tabulate


def _event(kind: Kind, name: str, start: float, end: float, number: int | None = None) -> Event:
    lane = "stream 7" if kind in ("kernel", "copy") else "thread 1"
    return Event(name, start, end, lane, kind, number)


def _row(table: Table, phase: str) -> Row:
    return next(row for row in table.rows if row.phase == phase)


def cuda_step(at: int = 0) -> list[Event]:
    """A step of 100 us: two launches in verify, one of a graph, and a wait for its copy."""
    step = [
        _event("range", STEP, 0, 100),
        _event("range", VERIFY, 10, 80),
        _event("range", PLAN, 12, 20),
        _event("range", COMMIT, 85, 95),
        _event("op", "aten::copy_", 13, 18),
        _event("op", "aten::to", 14, 17),  # inside the other: one call
        _event("call", "cudaMemcpyAsync", 15, 16, 1),
        _event("launch", "cudaLaunchKernel", 22, 25, 2),
        _event("launch", "cuLaunchKernel", 23, 24, 2),  # by which the runtime does it
        _event("graph_launch", "cudaGraphLaunch", 26, 28, 3),
        _event("sync", "cudaStreamSynchronize", 30, 75, 4),
        _event("copy", "Memcpy HtoD", 18, 20, 1),
        _event("kernel", "first", 30, 40, 2),
        _event("kernel", "second", 45, 60, 3),
        _event("kernel", "beside it", 50, 70, 3),  # at the same time, on the same graph
    ]
    return [
        Event(
            one.name,
            one.start + at,
            one.end + at,
            one.lane,
            one.kind,
            None if one.correlation is None else one.correlation + at,
        )
        for one in step
    ]


def test_work_belongs_to_the_innermost_phase_that_launched_it() -> None:
    """Guards against verify that is charged for plan, and kernels charged to where they ran."""
    table = tabulate(cuda_step())
    plan, verify = _row(table, PLAN), _row(table, VERIFY)
    assert (plan.ops, plan.copies, plan.launches, plan.device_us) == (1, 1, 0, 2)
    assert (verify.launches, verify.graph_launches, verify.kernels) == (1, 1, 3)
    assert (verify.syncs, verify.wait_us) == (1, 45)
    assert verify.device_us == 10 + 15 + 20  # of the work, not of the clock
    assert (plan.host_us, verify.host_us) == (8, 62)
    assert _row(table, COMMIT).host_us == 10
    assert _row(table, BETWEEN).host_us == 10 + 5 + 5
    assert table.total.host_us == 100


def test_the_device_is_idle_where_nothing_of_it_runs() -> None:
    """Guards against overlapping kernels counted twice, which would hide a gap."""
    table = tabulate(cuda_step())
    # Busy: 18 to 20, 30 to 40, 45 to 70.
    assert table.total.idle_us == 100 - 2 - 10 - 25
    assert _row(table, PLAN).idle_us == 6
    assert _row(table, VERIFY).idle_us == 62 - 10 - 25
    assert (table.gaps, table.longest_gap_us) == (4, 30)


def test_counts_are_means_and_times_medians() -> None:
    """Guards against a stall of one step in every phase, and a launch lost to a median."""
    steps = [one for at in (0, 1000, 2000) for one in cuda_step(at)]
    stalled = [
        Event(one.name, one.start, one.end + 500, one.lane, one.kind)
        if (one.name, one.start) == (STEP, 2000)
        else one
        for one in steps
    ]
    extra = _event("launch", "cudaLaunchKernel", 2097, 2098, 99)
    table = tabulate([*stalled, extra])
    assert table.num_steps == 3
    assert table.total.host_us == 100
    assert _row(table, VERIFY).launches == 1
    assert _row(table, BETWEEN).launches == pytest.approx(1 / 3)
    assert table.total.device_us == 47


def test_without_a_device_the_launches_are_its_work() -> None:
    """Guards against a CPU table that says the machine is idle while it computes."""
    table = tabulate(
        [
            _event("range", STEP, 0, 50),
            _event("range", VERIFY, 5, 45),
            _event("launch", "launch linear", 10, 20),
            _event("op", "aten::slice", 21, 22),
            _event("launch", "launch piece", 25, 40),
            _event("op", "aten::mul", 30, 35),  # of the piece
        ]
    )
    verify = _row(table, VERIFY)
    assert (verify.launches, verify.ops, verify.kernels) == (2, 1, 0)
    assert (verify.device_us, verify.idle_us, verify.host_us) == (25, 15, 40)
    assert table.gaps == 3


def test_what_no_step_owns_is_told_apart() -> None:
    """Guards against work of another thread, or before the steps, added to a phase."""
    events = cuda_step()
    events.append(Event("cudaLaunchKernel", 30, 31, "thread 2", "launch", 8))
    events.append(_event("kernel", "unknown", 72, 73, 9))
    table = tabulate(events)
    outside = _row(table, OUTSIDE)
    assert (outside.launches, outside.kernels, outside.device_us, outside.host_us) == (1, 1, 1, 0)
    assert _row(table, VERIFY).launches == 1


def test_a_trace_without_steps_is_refused() -> None:
    """Guards against a table of nothing, or a division by zero."""
    with pytest.raises(ValueError, match="no range named 'step'"):
        tabulate([_event("range", VERIFY, 0, 1)])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cudaLaunchKernel_v7000", "launch"),
        ("cudaLaunchKernelExC_v11060", "launch"),
        ("cuLaunchKernelEx", "launch"),
        ("cudaLaunchCooperativeKernel", "launch"),
        ("cudaGraphLaunch_v10000", "graph_launch"),
        ("cuGraphLaunch", "graph_launch"),
        ("cudaStreamSynchronize_v3020", "sync"),
        ("cudaEventSynchronize", "sync"),
        ("cudaMemcpy_v3020", "sync"),
        ("cudaMemcpyAsync_v3020", "call"),
        ("cudaLaunchHostFunc_v10000", "call"),
        ("cudaEventRecord_v3020", "call"),
    ],
)
def test_calls_are_known_by_name(name: str, kind: Kind) -> None:
    """Guards against a new suffix, or a launch of the driver's, that is no launch any more."""
    assert call_kind(name) == kind


def test_every_line_of_the_table_has_every_column() -> None:
    """Guards against markdown that no viewer shows as a table."""
    lines = markdown(tabulate(cuda_step())).splitlines()
    assert len({one.count("|") for one in lines[:-2]}) == 1
    assert lines[-1].startswith("1 steps")
    assert json.dumps(tabulate(cuda_step()).as_dict())


def _chrome(category: str, name: str, start: float, length: float, **more: Any) -> dict[str, Any]:
    place = {"pid": 0, "tid": 7} if category.startswith(("kernel", "gpu")) else {"pid": 1, "tid": 1}
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, **place, **more}


def test_the_profilers_categories_are_read() -> None:
    """Guards against a CUDA trace of which only the host is read: none can be made here."""
    trace = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
        _chrome("user_annotation", STEP, 0, 100),
        _chrome("user_annotation", "ProfilerStep#3", 0, 100),
        _chrome("gpu_user_annotation", STEP, 40, 20),
        _chrome("cpu_op", "aten::add", 1, 9),
        _chrome("cuda_runtime", "cudaLaunchKernel", 2, 3, args={"correlation": 5}),
        _chrome("cuda_driver", "cuLaunchKernel", 12, 3, args={"correlation": 6}),
        _chrome("cuda_runtime", "cudaDeviceSynchronize", 20, 60, args={"correlation": 7}),
        _chrome("kernel", "add", 30, 5, args={"correlation": 5, "stream": 7}),
        _chrome("kernel", "mul", 40, 5, args={"correlation": 6, "stream": 7}),
        _chrome("gpu_memset", "Memset", 50, 1, args={"correlation": 8}),
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "ts": 2, "pid": 1, "tid": 1, "id": 5},
    ]
    total = tabulate(read_events(trace)).total
    assert (total.launches, total.ops, total.kernels, total.copies, total.syncs) == (2, 1, 2, 1, 1)
    assert (total.host_us, total.device_us, total.idle_us) == (100, 11, 89)


def test_the_picture_is_of_the_median_step(tmp_path: Path) -> None:
    """Guards against a stall drawn as the rule, and bars of another step in it."""
    steps = [one for at in (0, 1000, 2000) for one in cuda_step(at)]
    events = [
        Event(one.name, one.start, one.end + {0: 9, 1000: 400, 2000: 50}[one.start], "t", "range")
        if one.name == STEP
        else one
        for one in steps
    ]
    assert median_step(events).start == 2000
    lanes = bars(events)
    assert list(lanes) == ["phases", "launches", "device"]
    assert lanes["phases"][0] == (0.0, pytest.approx(0.15), BETWEEN)
    assert [name for _, _, name in lanes["device"]] == [
        "Memcpy HtoD", "first", "second", "beside it",
    ]  # fmt: skip
