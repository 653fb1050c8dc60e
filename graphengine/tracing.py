"""Tracing: the names of a step's phases, and the ranges that show them in a profiler.

Owns the one list of names. A range is seen by torch.profiler on any device and, as NVTX, by Nsight
Systems where there is CUDA; who listens is told when each began and ended. Off unless somebody
asks: then a phase costs one look at a flag. Knows nothing of what the phases do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import wraps
from types import TracebackType
from typing import Final, ParamSpec, TypeVar

import torch

STEP: Final = "step"  # around all others
SCHEDULE: Final = "schedule"
PREFILL: Final = "prefill"
DRAFT: Final = "draft"
VERIFY: Final = "verify"  # launching it, and reading what it brought
PLAN: Final = "plan"  # inside verify: inputs written, attention planned
COMMIT: Final = "commit"
EMIT: Final = "emit"  # inside commit
PHASES: Final = (SCHEDULE, PREFILL, DRAFT, VERIFY, PLAN, COMMIT, EMIT)

P = ParamSpec("P")
R = TypeVar("R")
Listener = Callable[[str, float, float], None]
"""Called at the end of a range with its name, and when it began and ended, by `perf_counter`."""

_OFF: Final = nullcontext()
_is_on = False
_listener: Listener | None = None


def enable() -> AbstractContextManager[object]:
    """Name the phases from here on: for good, or as a context until its end.

    A range that is open when this changes ends as it began.
    """
    return _switch(_listener)


def listen(listener: Listener) -> AbstractContextManager[object]:
    """Name the phases and tell the listener of each, as a context until its end.

    Phases of all engines of this process, as they end: those inside another before it.
    """
    return _switch(listener)


def span(name: str) -> AbstractContextManager[object]:
    """A range of this name, which one of the constants above is."""
    return _Span(name) if _is_on else _OFF


def traced(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Each call of the function is a range of this name."""

    def trace(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def inner(*args: P.args, **kwargs: P.kwargs) -> R:
            if not _is_on:
                return function(*args, **kwargs)
            with _Span(name):
                return function(*args, **kwargs)

        return inner

    return trace


def _switch(listener: Listener | None) -> AbstractContextManager[object]:
    """Switch on; the context's end brings back what was before."""
    until = ExitStack()
    until.callback(_set, _is_on, _listener)
    _set(True, listener)
    return until


def _set(on: bool, listener: Listener | None) -> None:
    global _is_on, _listener
    _is_on, _listener = on, listener


class _Span:
    """One range; ends however its block ends."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._record = torch.profiler.record_function(name)
        self._has_nvtx = torch.cuda.is_available()
        self._listener = _listener
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()
        if self._has_nvtx:
            torch.cuda.nvtx.range_push(self._name)
        self._record.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._record.__exit__(kind, error, trace)
        if self._has_nvtx:
            torch.cuda.nvtx.range_pop()
        if self._listener is not None:
            self._listener(self._name, self._start, time.perf_counter())
