"""CudaGraph, against a double of torch.cuda: what is asked of it, and in which order."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch

from capture import manager as manager_module
from capture.checks import CaptureError
from capture.config import CaptureConfig
from capture.cuda import CudaGraph, CudaStream
from capture.edge import Edge
from capture.manager import CaptureManager, resolve_graph_kind
from capture.ops import PythonOp
from capture.shapes import ShapeTable
from capture.stream import InlineStream
from graphengine.kernels import library
from tests.capture.cuda_double import Double, install
from tests.capture.helpers import KEY, TIER, bits, fill_inputs, make_bench, outputs
from tests.graphengine.engine.setups import Setup
from tests.tiny import make_checkpoint

CUDA = torch.device("cuda")


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Double:
    return install(monkeypatch)


def make_graph(bench: object, *, debug: bool = False, **changes: object) -> CudaGraph:
    given = {"fn": bench.step, "prepare": lambda variant: bench.prepare(KEY, variant)}  # type: ignore[attr-defined]
    given |= changes
    fn = given.pop("fn")
    stream = CudaStream(CUDA)
    return CudaGraph(fn, bench.buffers, KEY, stream=stream, debug=debug, **given)  # type: ignore[attr-defined, arg-type]


@pytest.mark.parametrize("debug", [False, True])
def test_a_replay_equals_the_step(double: Double, debug: bool) -> None:
    """A graph of what warm-up or capture found in the buffers."""
    bench = make_bench()
    graph = make_graph(bench, debug=debug)
    calls = bench.step.calls
    for seed in range(3):
        expected = bits(bench.eager(KEY, 1 + seed % 2, seed))
        calls += 1
        assert bits(bench.replay(graph, KEY, 1 + seed % 2, seed)) == expected
    assert bench.step.calls == calls, "a replay runs the step's Python"


def test_inputs_are_made_anew_between_warm_up_and_capture(double: Double) -> None:
    """A capture over what warm-up has left."""
    bench = make_bench()

    def prepare(variant: int) -> None:
        double.events.append(f"prepare {variant}")
        bench.prepare(KEY, variant)

    def step(views: Mapping[str, torch.Tensor]) -> None:
        double.events.append("step")
        bench.step(views)

    make_graph(bench, fn=step, prepare=prepare)
    recorded = ["prepare 0", "step", "prepare 1", "step", "step", "step"]
    warmed = ["prepare 0", "step", "prepare 0", "step"]
    captured = ["prepare 1", "synchronize", "capture", "step"]
    assert double.events == [*recorded, *warmed, *captured]


def test_a_sync_or_work_outside_ops_is_refused(double: Double) -> None:
    """What a CUDA graph would leave out of every replay."""
    bench = make_bench()

    def reads(views: Mapping[str, torch.Tensor]) -> None:
        bench.step(views)
        views["ids"][0].item()

    def computes(views: Mapping[str, torch.Tensor]) -> None:
        bench.step(views)
        views["ids"] += 1

    for fn, message in ((reads, "host sync"), (computes, "outside an op")):
        with pytest.raises(CaptureError, match=message):
            make_graph(bench, fn=fn)
    assert "capture" not in double.events


def test_a_replay_that_allocates_or_a_buffer_that_moves_is_found(double: Double) -> None:
    bench = make_bench()

    def allocate(x: torch.Tensor) -> None:
        double.num_allocated += 1

    greedy = PythonOp("greedy", allocate)

    def step(views: Mapping[str, torch.Tensor]) -> None:
        bench.step(views)
        greedy(views["ids"])

    graph = make_graph(bench, fn=step, debug=True)
    with pytest.raises(CaptureError, match="replay has allocated memory"):
        graph.replay()
    sound = make_graph(bench, debug=True)
    sound.replay()
    bench.buffers._storages["x"] = bench.buffers._storages["x"].clone()
    with pytest.raises(CaptureError, match="moved since capture"):
        sound.replay()


def test_a_manager_captures_all_in_one_stream_and_pool(
    double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool or stream a cell, in which the allocator cannot share memory."""
    monkeypatch.setattr(manager_module, "resolve_graph_kind", lambda config, device: "cuda")
    bench = make_bench()
    config = CaptureConfig(num_reqs=(1, 2, 4, 8))
    table = ShapeTable.from_config(config, max_num_seqs=8, max_draft_tokens=3, tiers=(TIER,))
    manager = CaptureManager(
        table,
        bench.buffers,
        config,
        steps={TIER: bench.step},
        prepare=bench.prepare,
        run_program=library.load().run_calls,
        stream=CudaStream(CUDA),
    )
    manager.capture_all()
    assert double.events.count("capture") == len(table)
    assert (len(double.pools), len(double.streams)) == (1, 1)
    for num_reqs in (8, 7, 3, 1, 4):
        key = manager.dispatch(num_reqs, 2, TIER)
        expected = bits(bench.eager(key, num_reqs, num_reqs))
        fill_inputs(bench.buffers, key, num_reqs, num_reqs)
        manager.replay(key, num_reqs=num_reqs, num_tokens=num_reqs * key.query_len)
        assert bits(outputs(bench.buffers, key)) == expected


def test_the_runners_own_inputs_can_be_captured(double: Double, tmp_path: Path) -> None:
    """Guards that refuse what the host does while it writes a cell's inputs."""
    engine = Setup(k=2, max_num_seqs=2, numerics="fast").start(make_checkpoint(tmp_path / "tiny"))
    runner = engine.runner
    stream = CudaStream(CUDA)
    runner.edge = Edge(runner.buffers, InlineStream())
    runner.edge.is_direct = False  # areas that are copied, as on a GPU
    for key in list(runner.manager.table)[:2]:
        tier = runner.manager._tiers[key.tier]
        prepare = partial(tier.prepare, key)
        graph = CudaGraph(tier.step, runner.buffers, key, prepare=prepare, stream=stream)
        graph.replay()
    engine.close()


def test_the_kind_of_graph_follows_the_device() -> None:
    assert resolve_graph_kind(CaptureConfig(), CUDA) == "cuda"
    assert resolve_graph_kind(CaptureConfig(), torch.device("cpu")) == "tape"
    with pytest.raises(ValueError, match="graph='cuda': not available on device cpu"):
        resolve_graph_kind(CaptureConfig(graph="cuda"), torch.device("cpu"))
