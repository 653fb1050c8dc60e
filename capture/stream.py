"""Streams: where work on a device's storages is put, to be run in the order in which it came.

One small protocol. `InlineStream` runs work at once, `ThreadStream` in a thread of its own, which
is how a CPU steps asynchronously; `CudaStream` of cuda.py is a GPU's. Knows nothing of the work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Protocol

Work = Callable[[], None]


class Event(Protocol):
    """A place in a stream."""

    def wait(self) -> None:
        """Until all work before it has run; raises what that has raised."""
        ...


class Stream(Protocol):
    """An ordered queue in front of a device."""

    def run(self, work: Work) -> None:
        """Run it behind all that came before, now or later; what it reads of the host must stay."""
        ...

    def record(self) -> Event:
        """The place behind all that came before."""
        ...

    def synchronize(self) -> None:
        """Wait until all that came before has run; raises what it has raised."""
        ...

    def close(self) -> None:
        """Take no more work."""
        ...


class InlineStream:
    """Runs work at once; nothing is ever left to wait for."""

    def run(self, work: Work) -> None:
        work()

    def record(self) -> Event:
        return _Passed()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing to stop."""


class _Passed:
    def wait(self) -> None:
        """Nothing to wait for."""


class ThreadStream:
    """Runs work in one thread of its own.

    Once work has raised, all behind it is dropped until somebody waits, who gets the exception.

    Args:
        delay: called in the thread before each piece of work; for tests of other timings.
    """

    def __init__(self, delay: Work | None = None) -> None:
        self._queue: SimpleQueue[Work | _ThreadEvent | None] = SimpleQueue()
        self._errors: list[BaseException] = []
        # The thread knows the queue, not the stream, which may go without having been closed.
        serve = partial(_serve, self._queue, self._errors, delay)
        self._thread = threading.Thread(target=serve, name="graphengine-stream", daemon=True)
        self._thread.start()

    def run(self, work: Work) -> None:
        self._queue.put(work)

    def record(self) -> Event:
        event = _ThreadEvent(self._errors)
        self._queue.put(event)
        return event

    def synchronize(self) -> None:
        self.record().wait()

    def close(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def __del__(self) -> None:
        self._queue.put(None)


class _ThreadEvent:
    def __init__(self, errors: list[BaseException]) -> None:
        self.passed = threading.Event()
        self._errors = errors

    def wait(self) -> None:
        self.passed.wait()
        if self._errors:
            raise self._errors.pop()


def _serve(
    queue: SimpleQueue[Work | _ThreadEvent | None], errors: list[BaseException], delay: Work | None
) -> None:
    while (work := queue.get()) is not None:
        if isinstance(work, _ThreadEvent):
            work.passed.set()
        elif not errors:
            try:
                if delay is not None:
                    delay()
                work()
            except BaseException as error:  # noqa: BLE001  (whoever waits gets it)
                errors.append(error)
        del work  # what it holds is not kept until the next one comes
