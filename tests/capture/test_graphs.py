"""Graph kinds: one step, several launchers, the same bits; padding that never goes stale."""

from typing import Any, get_args

import pytest
import torch

from capture.config import CaptureConfig, GraphKind
from capture.graph import CompiledGraph, EagerGraph
from capture.manager import resolve_graph_kind
from capture.shapes import ShapeKey
from tests.capture.helpers import KEY, TIER, Bench, bits, fill_inputs, make_bench, make_manager

CPU_KINDS = ("eager", "compiled", "tape")


@pytest.fixture
def bench() -> Bench:
    return make_bench()


@pytest.mark.parity
@pytest.mark.parametrize("key", [KEY, ShapeKey(1, 1, TIER), ShapeKey(5, 2, TIER)])
def test_all_kinds_give_the_same_bits(bench: Bench, key: ShapeKey) -> None:
    graphs = [
        EagerGraph(bench.step, bench.buffers, key),
        CompiledGraph(bench.step, bench.buffers, key),
        bench.tape(key=key),
    ]
    assert [graph.kind for graph in graphs] == list(CPU_KINDS)
    for seed in range(3):
        results = [bits(bench.replay(graph, key, key.num_reqs, seed)) for graph in graphs]
        assert results[0] == results[1] == results[2]


@pytest.mark.parity
@pytest.mark.parametrize("kind", CPU_KINDS)
@pytest.mark.parametrize("debug", [False, True])
def test_a_shrinking_batch_has_no_stale_rows(kind: Any, debug: bool) -> None:
    """Guards case 12: rows beyond the batch kept values of an earlier, larger one."""
    config = CaptureConfig(graph=kind, debug=debug)
    manager, bench = make_manager(config)
    manager.capture_all()
    fresh = make_bench()
    fresh.step = bench.step
    previous = None
    for seed, (num_reqs, drafts) in enumerate([(8, 3), (7, 1), (3, 3), (1, 0), (4, 2)]):
        key = manager.dispatch(num_reqs, drafts, TIER)
        fill_inputs(bench.buffers, key, num_reqs, seed)
        views, live = bench.buffers.cell(key), num_reqs * key.query_len
        assert views["x"][live:].eq(0).all()
        assert views["valid"].tolist() == [1] * num_reqs + [0] * (key.num_reqs - num_reqs)
        manager.replay(key, num_reqs=num_reqs, num_tokens=num_reqs * key.query_len)
        got = {name: views[name].clone() for name in ("logits", "ids", "sums")}
        fresh.buffers.clear(("input", "scratch", "output"))
        expected = fresh.eager(key, num_reqs, seed)
        assert bits(got) == bits(expected), f"{previous} -> {num_reqs}"
        assert not got["sums"][num_reqs:].any()
        previous = num_reqs


@pytest.mark.parity
def test_a_request_has_the_same_bits_in_every_cell(bench: Bench) -> None:
    """Guards padding: what shares a cell with a request must not reach it."""
    results = []
    for key in (ShapeKey(1, 2, TIER), ShapeKey(2, 2, TIER), ShapeKey(8, 2, TIER)):
        graph = bench.tape(key=key)
        results.append(bench.replay(graph, key, 1, seed=4)["logits"][:2])
    assert all(torch.equal(result, results[0]) for result in results)


def test_auto_is_tape_on_cpu_and_cuda_is_refused() -> None:
    """Guards against a silent fall from a requested CUDA graph to something else."""
    cpu = torch.device("cpu")
    assert resolve_graph_kind(CaptureConfig(), cpu) == "tape"
    for kind in get_args(GraphKind):
        if kind in CPU_KINDS:
            assert resolve_graph_kind(CaptureConfig(graph=kind), cpu) == kind
    with pytest.raises(ValueError, match=r"graph='cuda': not available on device cpu; use auto"):
        resolve_graph_kind(CaptureConfig(graph="cuda"), cpu)
    with pytest.raises(ValueError, match="graph='cuda'"):
        make_manager(CaptureConfig(graph="cuda"))
