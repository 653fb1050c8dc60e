"""CudaGraph: the GPU's graph, and the stream in which everything of an engine runs.

A step is warmed up, its inputs are made anew, and then it is captured: what warm-up has left in a
buffer must not be what a capture finds there. All graphs are captured in one side stream and share
one memory pool, largest first, so that the first one's memory serves all. Owns capture and replay;
knows nothing of what a step computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from capture.buffers import StaticBuffers
from capture.checks import CaptureError, no_sync, replay_guard
from capture.graph import StepFn
from capture.shapes import ShapeKey
from capture.stream import Event, Work
from capture.tape import record_checked

NUM_WARM_UPS = 2  # the first may compile and allocate


class CudaStream:
    """The current stream of a CUDA device, so that what anybody else does with torch is in order.

    Attributes:
        side: where graphs are captured, and nothing else runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.side = torch.cuda.Stream(device)
        self._pool: Any = None  # torch's type for it has no public name

    def run(self, work: Work) -> None:
        work()

    def record(self) -> Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return _CudaEvent(event)

    def synchronize(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        self.synchronize()

    @property
    def pool(self) -> Any:
        """The memory pool of all graphs."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


class CudaGraph:
    """A step as a CUDA graph.

    Args:
        fn: the step.
        buffers, key: the static storages and the cell whose views the step gets.
        prepare: fills the cell's inputs with plausible values; called with 0 and 1 for two
            different batches.
        stream: that of all graphs and of whatever else touches the storages.
        debug: at every replay check that no storage has moved, poison what the step has to write
            before it, and what nobody may read behind it; and hold it to `replay_guard`.

    Raises:
        CaptureError: the step syncs, computes outside ops, or depends on data.
    """

    kind = "cuda"

    def __init__(
        self,
        fn: StepFn,
        buffers: StaticBuffers,
        key: ShapeKey,
        *,
        prepare: Callable[[int], None],
        stream: CudaStream,
        debug: bool = False,
    ) -> None:
        # Keeps every captured storage alive.
        self.calls = record_checked(fn, buffers, key, prepare).calls
        views = buffers.cell(key)
        with no_sync():
            for _ in range(NUM_WARM_UPS):
                prepare(0)
                stream.run(lambda: fn(views))
        prepare(1)
        stream.synchronize()
        self._device = stream.device
        before = torch.cuda.memory_reserved(self._device)
        self._graph = torch.cuda.CUDAGraph()
        with no_sync(), torch.cuda.graph(self._graph, pool=stream.pool, stream=stream.side):
            fn(views)
        self.num_bytes = max(0, torch.cuda.memory_reserved(self._device) - before)
        self._buffers = buffers
        self._addresses = buffers.addresses()
        self._debug = debug

    def replay(self) -> None:
        if not self._debug:
            self._graph.replay()
            return
        if self._buffers.addresses() != self._addresses:
            raise CaptureError("a static buffer moved since capture")
        self._buffers.poison(("scratch", "output"))
        with replay_guard(self._device):
            self._graph.replay()
        self._buffers.poison(("input", "scratch"))
