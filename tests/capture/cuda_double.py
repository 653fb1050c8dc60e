"""A double of torch.cuda for machines without a GPU: what is captured is recorded op by op, and a
replay runs what was recorded, none of the step's Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from capture.ops import set_recorder
from capture.tape import Tape


class Double:
    """See the module docstring. `events` tells in which order things were asked for."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.num_allocated = 0
        self.capturing = False
        self.pools: set[Any] = set()
        self.streams: set[int] = set()
        double = self

        class Stream:
            def __init__(self, device: torch.device) -> None:
                self.device = device

            def synchronize(self) -> None:
                double.events.append("synchronize")

        class Event:
            def record(self, stream: Stream) -> None:
                double.events.append("record")

            def synchronize(self) -> None:
                double.events.append("wait")

        class CUDAGraph:
            tape: Tape

            def replay(self) -> None:
                double.events.append("replay")
                for call in self.tape.calls:
                    call.op.run(*call.args)

        @contextmanager
        def graph(target: CUDAGraph, pool: Any, stream: Stream) -> Iterator[None]:
            double.events.append("capture")
            double.pools.add(pool)
            double.streams.add(id(stream))
            target.tape = Tape()
            double.capturing = True
            set_recorder(target.tape)
            try:
                yield
            finally:
                set_recorder(None)
                double.capturing = False

        current = Stream(torch.device("cpu"))

        self.names = {
            "Stream": Stream,
            "Event": Event,
            "CUDAGraph": CUDAGraph,
            "graph": graph,
            "current_stream": lambda device: current,
            "graph_pool_handle": lambda: (0, 1),
            "get_rng_state": lambda device: torch.zeros(1),
            "memory_reserved": lambda device: 0,
            "memory_stats": lambda device: {"allocation.all.allocated": self.num_allocated},
        }


def install(monkeypatch: pytest.MonkeyPatch) -> Double:
    double = Double()
    for name, value in double.names.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return double
