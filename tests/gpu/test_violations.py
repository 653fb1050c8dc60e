"""Planted violations of the capture contract on the device: each must be found by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch

from capture.buffers import BufferSpec, StaticBuffers
from capture.checks import CaptureError
from capture.cuda import CudaGraph, CudaStream
from capture.ops import PythonOp
from capture.shapes import ShapeKey
from tests.gpu.device import gpu

pytestmark = gpu
KEY = ShapeKey(2, 3, "greedy")
SPECS = (
    BufferSpec(name="x", shape=("T", 8), dtype=torch.float32, role="input"),
    BufferSpec(name="doubled", shape=("T", 8), dtype=torch.float32, role="scratch"),
    BufferSpec(name="sums", shape=("T",), dtype=torch.float32, role="output"),
)
Views = Mapping[str, torch.Tensor]
double = PythonOp("double", lambda out, x: torch.mul(x, 2, out=out))
add_up = PythonOp("add_up", lambda out, x: torch.sum(x, 1, out=out))


def step(views: Views) -> None:
    double(views["doubled"], views["x"])
    add_up(views["sums"], views["doubled"])


class Bench:
    """Buffers and a stream, and a graph of any step over them."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.buffers = StaticBuffers(
            SPECS, max_num_reqs=2, max_num_tokens=6, max_cell_tokens=6, device=self.device
        )
        self.stream = CudaStream(self.device)

    def graph(self, fn: Callable[[Views], None], *, debug: bool = False) -> CudaGraph:
        return CudaGraph(
            fn, self.buffers, KEY, prepare=self.prepare, stream=self.stream, debug=debug
        )

    def prepare(self, variant: int) -> None:
        self.stream.run(lambda: self.buffers.whole("x").fill_(variant + 1))
        self.stream.synchronize()

    def replay(self, graph: CudaGraph) -> torch.Tensor:
        self.stream.run(graph.replay)
        self.stream.synchronize()
        return self.buffers.cell(KEY)["sums"].clone()


@pytest.mark.parametrize("debug", [False, True])
def test_the_step_without_a_plant(debug: bool) -> None:
    bench = Bench()
    graph = bench.graph(step, debug=debug)
    for variant in range(3):
        bench.prepare(variant)
        torch.cuda.synchronize()
        assert bench.replay(graph).tolist() == [16.0 * (variant + 1)] * 6


def test_a_sync_is_refused() -> None:
    """In the step, and inside an op, where only the warm-up meets it."""
    bench = Bench()
    reads = PythonOp("reads", lambda x: x[0, 0].item())

    def in_the_step(views: Views) -> None:
        step(views)
        views["sums"][0].item()

    def in_an_op(views: Views) -> None:
        step(views)
        reads(views["x"])

    for fn in (in_the_step, in_an_op):
        with pytest.raises(CaptureError, match="sync"):
            bench.graph(fn)


def test_work_outside_an_op_is_refused() -> None:
    def fn(views: Views) -> None:
        step(views)
        views["sums"].add_(1)

    with pytest.raises(CaptureError, match="outside an op"):
        Bench().graph(fn)


def test_a_replay_that_allocates_is_found() -> None:
    bench = Bench()
    graph = bench.graph(step, debug=True)
    captured, kept = graph._graph, []

    class Greedy:
        def replay(self) -> None:
            captured.replay()
            kept.append(torch.empty(1 << 20, device=bench.device))

    graph._graph = Greedy()  # type: ignore[assignment]
    with pytest.raises(CaptureError, match="allocated"):
        bench.replay(graph)


def test_a_buffer_that_moves_is_found() -> None:
    bench = Bench()
    graph = bench.graph(step, debug=True)
    bench.buffers._storages["x"] = bench.buffers.whole("x").clone()
    with pytest.raises(CaptureError, match="moved"):
        bench.replay(graph)


def test_scratch_that_is_read_before_it_is_written_shows() -> None:
    """Debug fills it with NaN before every replay."""
    bench = Bench()
    graph = bench.graph(lambda views: add_up(views["sums"], views["doubled"]), debug=True)
    assert bench.replay(graph).isnan().all()


def test_a_sync_that_torch_does_not_see_breaks_the_capture() -> None:
    bench = Bench()
    waits = PythonOp("waits", lambda x: torch.cuda.synchronize())

    def fn(views: Views) -> None:
        step(views)
        waits(views["x"])

    with pytest.raises(RuntimeError):
        bench.graph(fn)
    torch.cuda.synchronize()
    Bench().graph(step)  # and leaves the device usable
