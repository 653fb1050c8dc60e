"""Streams: where work on a device's storages is put, to be run in the order in which it came.

One small protocol. `InlineStream` runs work at once, `ThreadStream` in a thread of its own, which
is how a CPU steps asynchronously; `CudaStream` of cuda.py is a GPU's. Knows nothing of the work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
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

    Once work has raised, all behind it is dropped, and whoever waits gets the exception.

    Args:
        delay: called in the thread before each piece of work; for tests of other timings.
    """

    def __init__(self, delay: Work | None = None) -> None:
        self._queue: SimpleQueue[Work | _ThreadEvent | None] = SimpleQueue()
        self._delay = delay
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="graphengine-stream", daemon=True)
        self._thread.start()

    def run(self, work: Work) -> None:
        self._queue.put(work)

    def record(self) -> Event:
        event = _ThreadEvent(self)
        self._queue.put(event)
        return event

    def synchronize(self) -> None:
        self.record().wait()

    def close(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def check(self) -> None:
        """Raise, once, what work has raised; then the stream works again."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                if isinstance(work, _ThreadEvent):
                    work.passed.set()
                elif self._error is None:
                    if self._delay is not None:
                        self._delay()
                    work()
            except BaseException as error:  # noqa: BLE001  (whoever waits gets it)
                self._error = error


class _ThreadEvent:
    def __init__(self, stream: ThreadStream) -> None:
        self.passed = threading.Event()
        self._stream = stream

    def wait(self) -> None:
        self.passed.wait()
        self._stream.check()
