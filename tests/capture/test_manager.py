"""CaptureManager: what is captured when, what is counted, what is refused, what is freed."""

import gc
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from capture.buffers import StaticBuffers
from capture.checks import CaptureError
from capture.config import CaptureConfig
from capture.manager import CaptureManager, check_memory_budget, warm_up_cells
from capture.ops import WORDS_PER_CALL
from capture.shapes import ShapeKey
from tests.capture.helpers import (
    SPECS,
    TIER,
    bits,
    fill_inputs,
    make_bench,
    make_manager,
    outputs,
)


def test_captures_every_cell_largest_first() -> None:
    """Guards the order that lets one pool serve all, and the whole of the table."""
    manager, _ = make_manager()
    seen: list[tuple[int, int, str]] = []
    manager.capture_all(lambda index, total, what: seen.append((index, total, what)))
    names = [str(key) for key in manager.table]
    assert names[0] == "8x4:greedy"
    assert seen == [
        *((index, len(names), name) for index, name in enumerate(names)),
        (len(names), len(names), "captured"),
    ]
    assert list(manager.stats.seconds) == list(manager.stats.num_bytes) == names
    assert all(seconds > 0 for seconds in manager.stats.seconds.values())
    assert all(num_bytes > 0 for num_bytes in manager.stats.num_bytes.values())


@pytest.mark.parity
def test_every_batch_of_the_grid_replays_and_equals_eager() -> None:
    """Guards case 16 end to end: dispatch, capture and buffers agree on every size."""
    manager, bench = make_manager(CaptureConfig(num_reqs=(2, 5)), max_num_seqs=6)
    manager.capture_all()
    for num_reqs in range(1, 7):
        for drafts in range(4):
            key = manager.dispatch(num_reqs, drafts, TIER)
            seed = num_reqs * 10 + drafts
            expected = bits(bench.eager(key, num_reqs, seed))
            fill_inputs(bench.buffers, key, num_reqs, seed)
            manager.replay(key, num_reqs=num_reqs, num_tokens=num_reqs * key.query_len)
            assert bits(outputs(bench.buffers, key)) == expected
    assert sum(manager.stats.replays.values()) == 24
    assert not manager.stats.eager_fallbacks


def test_counters() -> None:
    """Guards against padding and fall-backs that nobody sees."""
    manager, bench = make_manager(CaptureConfig(num_reqs=(1, 4, 8)))
    manager.capture_all()
    assert not manager.stats.replays, "capture counts as replay"
    for num_reqs, drafts, num_tokens in [(8, 3, 32), (3, 1, 6), (3, 1, 4), (1, 0, 1)]:
        key = manager.dispatch(num_reqs, drafts, TIER)
        fill_inputs(bench.buffers, key, num_reqs, 0)
        manager.replay(key, num_reqs=num_reqs, num_tokens=num_tokens)
    manager.count_eager("prefill")
    manager.count_eager("prefill")
    manager.count_eager("proposer ngram")
    assert manager.stats.replays == {"8x4:greedy": 1, "4x2:greedy": 2, "1x1:greedy": 1}
    assert manager.stats.padding_rows == (8 - 6) + (8 - 4), "padding request, and ragged tails"
    assert manager.stats.eager_fallbacks == {"prefill": 2, "proposer ngram": 1}


def test_the_report_lists_every_cell() -> None:
    manager, bench = make_manager(CaptureConfig(lazy=True))
    manager.capture_all()
    key = manager.dispatch(2, 1, TIER)
    fill_inputs(bench.buffers, key, 2, 0)
    manager.replay(key, num_reqs=2, num_tokens=4)
    lines = manager.report().splitlines()
    assert lines[0] == f"graph kind tape, 1 of {len(manager.table)} cells captured"
    cells = {line.split()[0]: line.split()[1:] for line in lines[2:-1]}
    assert list(cells) == [str(key) for key in manager.table]
    assert cells["2x2:greedy"][2] == "1"
    assert cells["8x4:greedy"] == ["-", "0", "0"]
    assert f"static buffers {bench.buffers.num_bytes} bytes" in lines[-1]


def test_a_late_capture_leaves_what_another_cell_has_given_out() -> None:
    """Guards outputs that the host has still to read when the next cell is captured (case 13)."""
    manager, bench = make_manager(CaptureConfig(lazy=True))
    manager.capture_all()
    first, second = manager.dispatch(3, 1, TIER), manager.dispatch(8, 3, TIER)
    fill_inputs(bench.buffers, first, 3, 1)
    manager.replay(first, num_reqs=3, num_tokens=6)
    expected = bits(outputs(bench.buffers, first))
    manager.make_ready(second)
    assert str(second) in manager.stats.seconds
    assert bits(outputs(bench.buffers, first)) == expected


@pytest.mark.parity
@pytest.mark.parametrize("kind", ["tape", "compiled", "eager"])
def test_lazy_captures_on_first_use_and_keeps_the_inputs(kind: Any) -> None:
    """Guards against a first step that runs on the inputs that capture made up."""
    manager, bench = make_manager(CaptureConfig(graph=kind, lazy=True, num_reqs=(1, 8)))
    manager.capture_all()
    assert not manager.stats.seconds
    for seed, (num_reqs, drafts) in enumerate([(5, 3), (1, 0), (5, 3)]):
        key = manager.dispatch(num_reqs, drafts, TIER)
        expected = bits(bench.eager(key, num_reqs, seed))
        fill_inputs(bench.buffers, key, num_reqs, seed)
        manager.replay(key, num_reqs=num_reqs, num_tokens=num_reqs * key.query_len)
        assert bits(outputs(bench.buffers, key)) == expected
    assert list(manager.stats.seconds) == ["8x4:greedy", "1x1:greedy"]


@pytest.mark.parametrize("lazy", [False, True])
def test_one_row_and_several_are_warmed_up_before_any_capture(lazy: bool) -> None:
    """Guards against compiling pieces inside a request, and against a forward for each cell."""
    warmed: list[int] = []
    manager, bench = make_manager(CaptureConfig(lazy=lazy))
    step = bench.step.norm

    def norm(views: Mapping[str, Tensor]) -> None:
        if len(warmed) < 2:  # a recording of the first cell comes after both
            assert not manager.stats.seconds
            warmed.append(len(views["x"]))
        step(views)

    bench.step.norm = norm  # type: ignore[method-assign]
    manager.capture_all()
    assert warmed == [1, 2]
    recordings = 0 if lazy else 4 * len(manager.table)
    assert bench.step.calls == 2 + recordings


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ([(8, 4), (2, 4), (1, 4), (2, 1), (1, 1)], [(1, 1), (2, 1)]),
        ([(8, 4), (8, 1)], [(8, 1)]),
        ([(1, 7), (1, 1)], [(1, 1), (1, 7)]),
        ([(1, 1)], [(1, 1)]),
    ],
)
def test_warm_up_takes_the_smallest_cells(
    cells: list[tuple[int, int]], expected: list[tuple[int, int]]
) -> None:
    found = warm_up_cells([ShapeKey(*cell, TIER) for cell in cells])
    assert [(key.num_reqs, key.query_len) for key in found] == expected


def test_a_cell_that_was_not_captured_is_no_silent_capture() -> None:
    manager, _ = make_manager()
    key = manager.dispatch(1, 0, TIER)
    with pytest.raises(AssertionError, match=r"cell 1x1:greedy was not captured"):
        manager.replay(key, num_reqs=1, num_tokens=1)


def test_more_live_requests_than_rows_fail_loudly() -> None:
    manager, _ = make_manager()
    manager.capture_all()
    for num_reqs in (0, 3):
        with pytest.raises(AssertionError, match=f"{num_reqs} live requests in cell 2x1:greedy"):
            manager.replay(ShapeKey(2, 1, TIER), num_reqs=num_reqs, num_tokens=1)


def test_a_step_that_breaks_the_contract_fails_the_start() -> None:
    manager, bench = make_manager()
    broken, _ = make_manager(fn=lambda views: bench.step(views) or views["valid"].tolist())
    with pytest.raises(CaptureError, match=r"tolist\(\)"):
        broken.capture_all()
    manager.capture_all()


# Memory.


def test_a_budget_below_the_need_names_the_bytes_before_capture() -> None:
    """Guards against an allocation failure, or a swap storm, in place of a clear error."""
    need = make_bench().buffers.num_bytes
    manager, bench = make_manager(CaptureConfig(memory_budget=need - 1))
    with pytest.raises(
        ValueError, match=f"memory_budget={need - 1}: static buffers need {need} bytes"
    ):
        manager.capture_all()
    assert bench.step.calls == 0


def test_a_budget_counts_graphs_too() -> None:
    """Guards against a budget that leaves out what capture itself takes."""
    need = make_bench().buffers.num_bytes
    manager, _ = make_manager(CaptureConfig(memory_budget=need + 1))
    with pytest.raises(ValueError, match=r"graphs \d+ so far; raise it, or lower max_num_seqs"):
        manager.capture_all()
    assert not manager.stats.num_bytes, "a cell that failed is counted"
    make_manager(CaptureConfig(memory_budget=need + (1 << 20)))[0].capture_all()


@pytest.mark.parity
def test_a_lazy_cell_over_the_budget_runs_uncaptured_and_counted() -> None:
    """Guards against a refusal, or lost inputs, in the middle of serving; and against silence."""
    one_cell = 3 * WORDS_PER_CALL * 8
    need = make_bench().buffers.num_bytes
    manager, bench = make_manager(CaptureConfig(memory_budget=need + one_cell, lazy=True))
    manager.capture_all()
    for seed, num_reqs in enumerate((2, 5, 2, 5, 5)):
        key = manager.dispatch(num_reqs, 1, TIER)
        expected = bits(bench.eager(key, num_reqs, seed))
        fill_inputs(bench.buffers, key, num_reqs, seed)
        manager.replay(key, num_reqs=num_reqs, num_tokens=2 * num_reqs)
        assert bits(outputs(bench.buffers, key)) == expected
    assert manager.stats.num_bytes == {"2x2:greedy": one_cell}
    assert list(manager.stats.seconds) == ["2x2:greedy"]
    assert manager.stats.eager_fallbacks == {"capture:memory_budget": 3}
    assert manager.stats.replays == {"2x2:greedy": 2, "5x2:greedy": 3}
    assert manager.report().startswith("graph kind tape, 1 of ")


def test_a_lazy_capture_that_fails_leaves_the_inputs_and_no_bytes() -> None:
    """Guards against a batch whose inputs are gone, and figures of a graph that is not there."""
    bench = make_bench()
    manager, bench = make_manager(
        CaptureConfig(lazy=True), fn=lambda views: bench.step(views) or views["valid"].tolist()
    )
    key = ShapeKey(2, 1, TIER)
    fill_inputs(bench.buffers, key, 2, 3)
    before = bits(bench.buffers.snapshot(("input",)))
    with pytest.raises(CaptureError, match=r"tolist\(\)"):
        manager.replay(key, num_reqs=2, num_tokens=2)
    assert bits(bench.buffers.snapshot(("input",))) == before
    assert not manager.stats.num_bytes
    assert not manager.stats.replays


def test_the_need_is_known_before_anything_is_allocated() -> None:
    """Guards against finding out by running out: this need is 2^50 bytes and more."""
    need = StaticBuffers(
        SPECS,
        max_num_reqs=8,
        max_num_tokens=1 << 50,
        max_cell_tokens=32,
        device=torch.device("meta"),
    ).num_bytes
    with pytest.raises(ValueError, match=f"static buffers need {need} bytes, graphs 0"):
        check_memory_budget(CaptureConfig(memory_budget=1 << 40), need)
    check_memory_budget(CaptureConfig(memory_budget=need), need)
    check_memory_budget(CaptureConfig(), need)


def test_memory_of_cells_is_shared() -> None:
    """Guards case 57: growth with the number of cells is the programs alone."""
    few, bench = make_manager(CaptureConfig(num_reqs=(8,), draft_lengths=(0,)))
    many, other = make_manager(CaptureConfig(num_reqs=tuple(range(1, 9))))
    few.capture_all()
    many.capture_all()
    assert bench.buffers.num_bytes == other.buffers.num_bytes
    assert len(many.table) == 8 * 4
    assert max(many.stats.num_bytes.values()) == max(few.stats.num_bytes.values()) < 1024


def test_capturing_again_takes_no_more_memory() -> None:
    """Guards case 57: a second capture returns to the same figure, and frees the first graphs."""
    manager, _ = make_manager()
    manager.capture_all()
    before = dict(manager.stats.num_bytes)
    old = [weakref.ref(graph) for graph in manager._graphs.values()]
    manager.capture_all()
    gc.collect()
    assert manager.stats.num_bytes == before
    assert not any(graph() for graph in old)


@pytest.mark.parametrize("kind", ["tape", "compiled", "eager"])
def test_close_frees_the_graphs_and_what_they_hold(kind: Any) -> None:
    """Guards against graphs that keep weights and buffers alive after the engine is closed."""
    manager, bench = make_manager(CaptureConfig(graph=kind))
    manager.capture_all()
    graphs = [weakref.ref(graph) for graph in manager._graphs.values()]
    weight = weakref.ref(bench.step.weight)
    manager.close()
    assert not any(graph() for graph in graphs)
    del manager, bench
    gc.collect()
    assert weight() is None


@pytest.mark.parametrize("lazy", [False, True])
def test_a_closed_manager_replays_nothing(lazy: bool) -> None:
    """Guards against a lazy manager that quietly captures again after close."""
    manager, _ = make_manager(CaptureConfig(lazy=lazy))
    manager.capture_all()
    manager.close()
    with pytest.raises(AssertionError, match=r"replayed after close\(\)"):
        manager.replay(ShapeKey(1, 1, TIER), num_reqs=1, num_tokens=1)


# Proposers.


@dataclass(slots=True)
class FakeProposer:
    name: str = "fake"
    graph_safe: bool = True
    captured: list[list[ShapeKey]] = field(default_factory=list)

    def capture(self, manager: CaptureManager) -> None:
        self.captured.append(list(manager.table))


def test_a_graph_safe_proposer_captures_over_the_same_table() -> None:
    manager, _ = make_manager()
    proposer = FakeProposer()
    manager.capture_proposer(proposer)
    assert proposer.captured == [list(manager.table)]


def test_a_proposer_that_is_not_graph_safe_is_refused_by_name() -> None:
    """Guards against capturing host code, whose replay would repeat the first proposal."""
    manager, _ = make_manager()
    proposer = FakeProposer(name="ngram", graph_safe=False)
    with pytest.raises(ValueError, match="proposer 'ngram' is graph_safe=False"):
        manager.capture_proposer(proposer)
    assert not proposer.captured


# Case 15: two engines in one process.


@pytest.mark.parity
def test_managers_share_no_graphs() -> None:
    """Guards case 15: a graph of one configuration replayed for another.

    The same key in two managers of different weights and different draft lengths, interleaved.
    """
    first, first_bench = make_manager(max_draft_tokens=3)
    second, second_bench = make_manager(max_draft_tokens=1)
    first.capture_all()
    second.capture_all()
    key = ShapeKey(2, 2, TIER)
    assert first.dispatch(2, 1, TIER) == second.dispatch(2, 1, TIER) == key
    assert not set(map(id, first._graphs.values())) & set(map(id, second._graphs.values()))
    addresses = {*first_bench.buffers.addresses().values()}
    assert not addresses & {*second_bench.buffers.addresses().values()}
    expected = [bits(bench.eager(key, 2, 1)) for bench in (first_bench, second_bench)]
    assert expected[0] != expected[1]
    for manager, bench, want in [
        (first, first_bench, expected[0]),
        (second, second_bench, expected[1]),
        (first, first_bench, expected[0]),
    ]:
        fill_inputs(bench.buffers, key, 2, 1)
        manager.replay(key, num_reqs=2, num_tokens=4)
        assert bits(outputs(bench.buffers, key)) == want
    assert first.stats.replays == {"2x2:greedy": 2}
    assert second.stats.replays == {"2x2:greedy": 1}


def test_closing_one_manager_leaves_the_other() -> None:
    first, _ = make_manager()
    second, bench = make_manager()
    first.capture_all()
    second.capture_all()
    first.close()
    key = ShapeKey(1, 1, TIER)
    expected = bits(bench.eager(key, 1, 0))
    fill_inputs(bench.buffers, key, 1, 0)
    second.replay(key, num_reqs=1, num_tokens=1)
    assert bits(outputs(bench.buffers, key)) == expected
