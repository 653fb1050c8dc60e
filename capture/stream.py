"""Streams: where work on a device's storages is put, to be run in the order in which it came.

One small protocol. `InlineStream` runs work at once, `ThreadStream` in a thread of its own, which
is how a CPU steps asynchronously; `CudaStream` of cuda.py is a GPU's. Knows nothing of the work.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

Work = Callable[[], None]


class StreamError(RuntimeError):
    """Work of a stream has failed, which is its cause; what came behind it was dropped."""


class Event(Protocol):
    """A place in a stream."""

    def wait(self) -> None:
        """Until all work before it has run; raises StreamError where some has failed."""
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
        """Wait until all that came before has run; raises StreamError where some has failed."""
        ...

    def reset(self) -> None:
        """Wait likewise, and forget what has failed: work goes on behind it."""
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

    def reset(self) -> None:
        """Nothing to forget."""

    def close(self) -> None:
        """Nothing to stop."""


class _Passed:
    def wait(self) -> None:
        """Nothing to wait for."""


class ThreadStream:
    """Runs work in one thread of its own.

    Once work has failed, all behind it is dropped and whoever waits gets a StreamError, until
    `reset`.

    Args:
        delay: called in the thread before each piece of work; for tests of other timings.
    """

    def __init__(self, delay: Work | None = None) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="graphengine-stream")
        self._delay = delay
        self._last: Future[None] | None = None

    def run(self, work: Work) -> None:
        self._last = self._thread.submit(_run, self._last, self._delay, work)

    def record(self) -> Event:
        return _Place(self, self._last)

    def synchronize(self) -> None:
        self.record().wait()

    def reset(self) -> None:
        if self._last is not None:
            self._last.exception()
        self._last = None

    def close(self) -> None:
        self._thread.shutdown()

    def wait_for(self, future: Future[None]) -> None:
        """Until this piece of work has run; StreamError where it or what came before has failed."""
        error = future.exception()
        if error is not None:
            raise StreamError(f"a step failed on the device: {error}") from error


class _Place:
    def __init__(self, stream: ThreadStream, future: Future[None] | None) -> None:
        self._stream = stream
        self._future = future

    def wait(self) -> None:
        if self._future is not None:
            self._stream.wait_for(self._future)


def _run(before: Future[None] | None, delay: Work | None, work: Work) -> None:
    if before is not None and (error := before.exception()) is not None:
        raise error
    if delay is not None:
        delay()
    work()
