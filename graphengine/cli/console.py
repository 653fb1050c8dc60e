"""The terminal: consoles, start-up progress, Ctrl-C between steps.

Owns what is written where: answers and tables on stdout, everything about them on stderr. Colour
and bars only on a terminal, as `NO_COLOR` and rich decide. Knows nothing of engines.
"""

from __future__ import annotations

import io
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

_PHASES = {"weights": "loading weights", "capture": "capturing cells"}
PIPED_WIDTH = 120  # of tables that go into a file or a pipe


def stdout() -> Console:
    """Console for answers and tables."""
    width = None if sys.stdout.isatty() else PIPED_WIDTH
    return Console(highlight=False, width=width)


def stderr() -> Console:
    """Console for everything else."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def note(text: str) -> None:
    """One plain line on stderr."""
    print(text, file=sys.stderr, flush=True)


def one_line(error: object) -> str:
    """An error's message without its line breaks."""
    return " ".join(str(error).split())


def read_stdin(read: Callable[[], str]) -> str:
    """What `read` gives of stdin.

    Raises:
        ValueError: stdin is not UTF-8 text.
    """
    try:
        return read()
    except UnicodeDecodeError as error:
        raise ValueError(f"stdin: not UTF-8 text ({error.reason})") from error


def show_anything(stream: TextIO) -> None:
    """Let a stream write `?` for what its encoding lacks, rather than fail halfway an answer."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")


def has_colour(console: Console) -> bool:
    """Whether coloured text may be written to it."""
    return console.is_terminal and not console.no_color and not console.is_dumb_terminal


class StartProgress:
    """Progress of the start: bars on a terminal, one line a finished phase elsewhere."""

    def __init__(self, bars: Progress | None) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}
        self._started: dict[str, float] = {}

    def __call__(self, phase: str, done: int, total: int, what: str) -> None:
        """See `StartProgress` of the engine's start-up: `done` of `total`, now at `what`."""
        name = _PHASES.get(phase, phase)
        self._started.setdefault(phase, time.perf_counter())
        if self._bars is not None:
            if phase not in self._tasks:
                self._tasks[phase] = self._bars.add_task(name, total=total)
            self._bars.update(self._tasks[phase], completed=done)
        elif done == total:
            seconds = time.perf_counter() - self._started[phase]
            note(f"{name}: {total} of {total} ({seconds:.1f} s)")


@contextmanager
def start_progress() -> Iterator[StartProgress]:
    """What to hand to an engine as `progress`; bars vanish when the start is over."""
    console = stderr()
    if not console.is_terminal:
        yield StartProgress(None)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        yield StartProgress(bars)


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[], None]]:
    """What to call after each of `total`: a bar on a terminal, one line beforehand elsewhere."""
    console = stderr()
    if not console.is_terminal:
        note(f"{what}: {total}")
        yield lambda: None
        return
    with Progress(console=console, transient=True) as bars:
        task = bars.add_task(what, total=total)
        yield lambda: bars.advance(task)


@contextmanager
def long_progress() -> Iterator[Callable[[str, int, int, str], None]]:
    """What to call with (phase, done, total, what) in work of hours.

    A bar a phase with the time left on a terminal; elsewhere a line for each twentieth of it.
    """
    console = stderr()
    if not console.is_terminal:
        yield _print_twentieths
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeRemainingColumn(), TextColumn("{task.fields[what]}"), console=console
    ) as bars:
        tasks: dict[str, TaskID] = {}

        def show(phase: str, done: int, total: int, what: str) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase, total=total, what=what)
            bars.update(tasks[phase], completed=done, what=what)

        yield show


def _print_twentieths(phase: str, done: int, total: int, what: str) -> None:
    if done == total or done * 20 // total > (done - 1) * 20 // total:
        note(f"{phase}: {done} of {total} {what}".rstrip())


class Interrupt:
    """Whether Ctrl-C was pressed."""

    def __init__(self) -> None:
        self.requested = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt  # pressed twice: do not wait for the step
        self.requested = True


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Ctrl-C sets a flag, so that an engine step is never cut in half; a second one raises."""
    interrupt = Interrupt()
    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, previous)
