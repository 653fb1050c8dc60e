"""Edge: how a step's inputs come from the host to the static buffers, and its outputs back.

Where the device is the CPU and work runs at once, host arrays *are* the static buffers, and nothing
is copied. Elsewhere the host writes into one of a few staging areas, which are copied in the order
of the stream, and may not write into one again before its copies have run. Knows nothing of what a
buffer means.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy.typing as npt
import torch

from capture.buffers import StaticBuffers
from capture.stream import Event, InlineStream, Stream

Array = npt.NDArray[Any]
HostViews = Mapping[str, Array]
NUM_AREAS = 3  # a step that runs, one that waits, and one that is being written


class Reading:
    """An output on its way to the host."""

    def __init__(self, host: torch.Tensor, event: Event) -> None:
        self._host = host
        self._event = event

    def wait(self) -> Array:
        """The numbers, once they are there."""
        self._event.wait()
        array: Array = self._host.numpy()
        return array


class Edge:
    """See the module docstring.

    Args:
        buffers: the static storages.
        stream: where steps run.
    """

    def __init__(self, buffers: StaticBuffers, stream: Stream) -> None:
        self._buffers = buffers
        self._stream = stream
        self.is_direct = buffers.device.type == "cpu" and isinstance(stream, InlineStream)
        self._areas: list[dict[str, torch.Tensor]] = [{} for _ in range(NUM_AREAS)]
        self._sent: list[Event | None] = [None] * NUM_AREAS
        self._at = 0

    @property
    def area(self) -> int:
        """Which area is written next; views of it may be kept by this number."""
        return self._at

    def views(self, device: Mapping[str, torch.Tensor], names: Iterable[str]) -> HostViews:
        """Host arrays of the area that is written next, shaped like these views of buffers."""
        if self.is_direct:
            return {name: device[name].numpy() for name in names}
        area = self._areas[self._at]
        for name in names:
            if name not in area:
                whole = self._buffers.whole(name)
                pinned = self._buffers.device.type == "cuda"
                area[name] = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=pinned)
        return {
            name: area[name][: device[name].numel()].view(device[name].shape).numpy()
            for name in names
        }

    def begin(self) -> None:
        """Before an area is written: wait until what it held has been copied."""
        event = self._sent[self._at]
        if event is not None:
            event.wait()
            self._sent[self._at] = None  # not before: the wait may break off

    def send(self, device: Mapping[str, torch.Tensor], host: HostViews) -> None:
        """Copy what has been written to the device, in the order of the stream; take the next area.

        Args:
            device: views of the buffers, of which those in `host` are written.
            host: what `views` gave for them.
        """
        if self.is_direct:
            return
        pairs = [(device[name], torch.from_numpy(array)) for name, array in host.items()]

        def copy() -> None:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

        self._stream.run(copy)
        self._sent[self._at] = self._stream.record()
        self._at = (self._at + 1) % NUM_AREAS

    def forget(self) -> None:
        """What was on its way is given up, since the stream has failed."""
        self._sent = [None] * NUM_AREAS

    def read(self, device: torch.Tensor) -> Reading:
        """Copy an output to the host, in the order of the stream; valid until the same is read
        again where the edge is direct, else for ever.
        """
        if self.is_direct:
            return Reading(device, self._stream.record())
        pinned = self._buffers.device.type == "cuda"
        host = torch.empty(device.shape, dtype=device.dtype, pin_memory=pinned)
        self._stream.run(lambda: _copy(host, device))
        return Reading(host, self._stream.record())


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
