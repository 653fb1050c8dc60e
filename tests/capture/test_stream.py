"""Streams and the edge: order, exceptions, and areas that are not written while they are copied."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from capture.edge import NUM_AREAS, Edge
from capture.stream import InlineStream, Stream, StreamError, ThreadStream
from tests.capture.helpers import KEY, make_buffers


@pytest.mark.parametrize("make", [InlineStream, ThreadStream])
def test_work_runs_in_order(make: type[Stream]) -> None:
    stream, seen = make(), []
    for number in range(50):
        stream.run(lambda number=number: seen.append(number))  # type: ignore[misc]
    stream.record().wait()
    assert seen == list(range(50))
    stream.close()
    stream.close()


def test_what_work_raises_reaches_who_waits_and_drops_what_builds_on_it() -> None:
    """A step that goes on from one that failed."""
    stream, seen = ThreadStream(), []

    def fail() -> None:
        raise ValueError("device")

    stream.run(fail)
    stream.run(lambda: seen.append("behind"))
    with pytest.raises(StreamError, match="device"):
        stream.synchronize()
    stream.run(lambda: seen.append("later"))
    with pytest.raises(StreamError, match="device"):
        stream.synchronize()
    assert not seen
    stream.reset()
    stream.run(lambda: seen.append("after"))
    stream.synchronize()
    assert seen == ["after"]
    stream.close()


def test_a_stream_that_is_dropped_ends_its_thread() -> None:
    stream = ThreadStream()
    stream.run(lambda: None)
    stream.synchronize()
    [thread] = stream._thread._threads
    del stream
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_host_arrays_are_the_buffers_where_work_runs_at_once() -> None:
    buffers = make_buffers()
    edge, views = Edge(buffers, InlineStream()), buffers.cell(KEY)
    host = edge.views(views, ["valid"])
    host["valid"][:] = 5
    assert views["valid"].tolist() == [5, 5]
    edge.send(views, host)
    assert edge.area == 0


def test_an_area_is_not_written_before_it_has_been_copied() -> None:
    """Inputs of a later step in the place of those of an earlier one."""
    gate = threading.Event()
    buffers, stream = make_buffers(), ThreadStream()
    edge, views = Edge(buffers, stream), buffers.cell(KEY)
    stream.run(lambda: gate.wait())
    seen: list[list[int]] = []
    for number in range(NUM_AREAS):
        edge.begin()
        host = edge.views(views, ["valid"])
        host["valid"][:] = number
        edge.send(views, host)
        stream.run(lambda: seen.append(views["valid"].tolist()))
    assert edge.area == 0
    opener = threading.Timer(0.05, gate.set)
    opener.start()
    edge.begin()  # waits
    assert gate.is_set()
    edge.views(views, ["valid"])["valid"][:] = 99
    stream.synchronize()
    assert seen == [[number, number] for number in range(NUM_AREAS)]
    stream.close()


def test_a_reading_is_of_its_own_place() -> None:
    """An output that the next step overwrites before it was read."""
    stream, output = ThreadStream(), torch.zeros(2)
    edge = Edge(make_buffers(), stream)
    readings = []
    for _ in range(3):
        stream.run(lambda: output.add_(1))
        readings.append(edge.read(output))
    assert [reading.wait().tolist() for reading in readings] == [[1, 1], [2, 2], [3, 3]]
    stream.close()
