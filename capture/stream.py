"""Streams: where work on a device's storages is put, to be run in the order in which it came.

One small protocol. On CPU the default runs work at once. Knows nothing of what the work is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

Work = Callable[[], None]


class Stream(Protocol):
    """An ordered queue in front of a device."""

    def run(self, work: Work) -> None:
        """Run it behind all that came before, now or later; what it reads of the host must stay."""
        ...

    def synchronize(self) -> None:
        """Wait until all that came before has run; raises what it has raised."""
        ...


class InlineStream:
    """Runs work at once."""

    def run(self, work: Work) -> None:
        work()

    def synchronize(self) -> None:
        """Nothing is ever left to wait for."""
