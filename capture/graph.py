"""Graphs: ways to launch one captured step over static buffers.

One small protocol, `replay()`. Every kind launches the same ops on the same storages, so kinds are
bit-equal by construction. Knows nothing of what the step computes. `TapeGraph` lives in tape.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from capture.buffers import StaticBuffers
from capture.shapes import ShapeKey

Views = Mapping[str, torch.Tensor]
# The captured step: reads and writes only the views (and tensors it owns); calls only ops.
StepFn = Callable[[Views], None]


class Graph(Protocol):
    """A captured step."""

    kind: str
    num_bytes: int  # host and device bytes that the graph itself holds, static buffers not counted

    def replay(self) -> None:
        """Run the step once over the current contents of the static buffers."""


class EagerGraph:
    """Calls the step from Python, views made anew each time: the baseline that the others are held
    to.
    """

    kind = "eager"
    num_bytes = 0

    def __init__(self, fn: StepFn, buffers: StaticBuffers, key: ShapeKey) -> None:
        self._fn = fn
        self._buffers = buffers
        self._key = key

    def replay(self) -> None:
        self._fn(self._buffers.new_cell(self._key))


class CompiledGraph:
    """Calls the step from Python with its views bound once.

    Compiles nothing itself: what runs are the step's own pieces, which `CaptureConfig.compile`
    makes native or compiled, alike for every kind of graph.
    """

    kind = "compiled"
    num_bytes = 0

    def __init__(self, fn: StepFn, buffers: StaticBuffers, key: ShapeKey) -> None:
        self._fn = fn
        self._views = buffers.cell(key)

    def replay(self) -> None:
        self._fn(self._views)
