"""Events of a torch.profiler trace, and the names by which launches on CPU appear in one.

Owns the reading of the profiler's Chrome trace, whose categories are the same on every device, and
the marking of native calls: on CPU a launch is a call of a kernel, of which torch knows nothing.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch

from capture.ops import Arg, NativeOp, Op, PythonOp
from graphengine import tracing
from graphengine.kernels import library
from profiles.trace import Event, Kind, call_kind

RANGES: Final = frozenset((tracing.STEP, *tracing.PHASES))
LAUNCH: Final = "launch "  # what the ranges of CPU launches begin with
GRAPH_LAUNCH: Final = "graph_launch "
_DEVICE_KINDS: Final[Mapping[str, Kind]] = {
    "kernel": "kernel",
    "gpu_memcpy": "copy",
    "gpu_memset": "copy",
}


def read_events(trace: Iterable[Mapping[str, Any]]) -> list[Event]:
    """The events that a table is made of.

    Args:
        trace: `traceEvents` of a Chrome trace as torch.profiler exports it; times in microseconds.
    """
    found = []
    for one in trace:
        kind = _kind(one.get("cat"), str(one.get("name")))
        if one.get("ph") != "X" or kind is None:
            continue
        found.append(
            Event(
                name=one["name"],
                start=float(one["ts"]),
                end=float(one["ts"]) + float(one["dur"]),
                lane=f"{one['pid']}/{one['tid']}",
                kind=kind,
                correlation=one.get("args", {}).get("correlation"),
            )
        )
    return found


def _kind(category: object, name: str) -> Kind | None:
    if category == "user_annotation":
        if name in RANGES:
            return "range"
        if name.startswith(GRAPH_LAUNCH):
            return "graph_launch"
        return "launch" if name.startswith(LAUNCH) else None
    if category == "cpu_op":
        return "op"
    if category in ("cuda_runtime", "cuda_driver"):
        return call_kind(name)
    return _DEVICE_KINDS.get(str(category))


def profiled(run: Callable[[], None], device: torch.device) -> list[Event]:
    """The events of a run, phases and launches named."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with tracing.enable(), torch.profiler.profile(activities=activities) as profile, _marked():
        run()
    with tempfile.TemporaryDirectory(prefix="graphengine-trace-") as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return read_events(data["traceEvents"])


@contextmanager
def _marked() -> Iterator[None]:
    """Calls of ops on tensors of the CPU are ranges that say so; those of CUDA show by themselves.

    Classes are changed, not engines: a run without a profiler must run no line of this.
    """

    def marking(run: Callable[..., None]) -> Callable[..., None]:
        def marked(op: Op, *args: Arg) -> None:
            if any(isinstance(one, torch.Tensor) and one.is_cuda for one in args):
                run(op, *args)
                return
            with torch.profiler.record_function(LAUNCH + op.name):
                run(op, *args)

        return marked

    with (
        patch.object(NativeOp, "run", marking(NativeOp.run)),
        patch.object(PythonOp, "run", marking(PythonOp.run)),
    ):
        yield


@contextmanager
def programs_named() -> Iterator[None]:
    """Engines that are opened inside replay tapes by a call that is a range where tracing is on."""
    loaded = library.load()
    run_calls: Callable[[int, int], None] = loaded.run_calls

    def named(program: int, num_calls: int) -> None:
        with tracing.span(f"{GRAPH_LAUNCH}of {num_calls} calls"):
            run_calls(program, num_calls)

    with patch.object(loaded, "run_calls", named):
        yield
