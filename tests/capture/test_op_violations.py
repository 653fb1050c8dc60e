"""Planted violations of what an op may do at replay, which debug mode refuses; and of randomness.

A recording runs no op, so what an op does by itself shows only where it runs: once when a debug
tape is captured, and at every replay of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from capture.checks import CaptureError, op_guard, replay_guard
from capture.compile import PieceCompiler
from capture.ops import CompiledOp, PythonOp
from tests.capture.helpers import KEY, Bench, Views, bits, host_view, make_bench

CPU = torch.device("cpu")
OpPlant = Callable[[torch.Tensor, torch.Tensor], Any]  # (x [T, width] fp32, valid [R] int32)

SYNCS: dict[str, OpPlant] = {
    "item": lambda x, valid: valid[0].item(),
    "tolist": lambda x, valid: valid.tolist(),
    "numpy": lambda x, valid: valid.numpy(),
    "cpu": lambda x, valid: valid.cpu(),
    "print": lambda x, valid: repr(x),
    "branch": lambda x, valid: x.add_(1) if valid[0] > 0 else None,
    "slice": lambda x, valid: x[: valid[0]].add_(1),
    "all": lambda x, valid: bool((x == x).all()),
    "equal": lambda x, valid: torch.equal(x, x),
    "nonzero": lambda x, valid: valid.nonzero(),
    "unique": lambda x, valid: valid.unique(),
    "masked_select": lambda x, valid: x.masked_select(x > 0),
    "boolean index": lambda x, valid: x[x > 0],
    "boolean assignment": lambda x, valid: x.__setitem__(x > 0, x[0, :1]),
    "repeat_interleave": lambda x, valid: valid.repeat_interleave(valid),
}
GENERATOR = torch.Generator()
RANDOM: dict[str, OpPlant] = {
    "rand": lambda x, valid: x.copy_(torch.rand(x.shape)),
    "randint": lambda x, valid: valid.copy_(torch.randint(9, valid.shape)),
    "in place": lambda x, valid: x.uniform_(),
    "multinomial": lambda x, valid: torch.multinomial(x.softmax(-1), 1),
    "dropout": lambda x, valid: functional.dropout(x, 0.5, training=True),
    "a generator of its own": lambda x, valid: x.normal_(generator=GENERATOR),
}
kept: list[torch.Tensor] = []
KEPT: dict[str, OpPlant] = {
    "a list": lambda x, valid: kept.append(x + 1),
    "one of many": lambda x, valid: kept.append([x * n for n in range(3)][1]),
    "a view of it": lambda x, valid: kept.append(torch.zeros(9)[2:4]),
    "a swapped storage": lambda x, valid: x.set_(x + 1),
    "a resized storage": lambda x, valid: kept.append(torch.empty(0).resize_(99)),
}


@pytest.fixture
def bench() -> Bench:
    return make_bench()


@pytest.fixture(autouse=True)
def _nothing_is_kept() -> Iterator[None]:
    yield
    kept.clear()


def scale(x: torch.Tensor) -> None:
    x.mul_(2)


def around(bench: Bench, op: PythonOp) -> Callable[[Views], None]:
    """The plain step with an op in its middle, over scratch and an input."""

    def fn(views: Views) -> None:
        bench.step.norm(views)
        op(views["normed"], views["valid"])
        bench.step.rest(views)

    return fn


def check_refused(bench: Bench, plant: OpPlant, message: str) -> None:
    """Refused at capture, by name; a tape without debug does not look."""
    fn = around(bench, PythonOp("planted", plant))
    with pytest.raises(CaptureError, match=message):
        bench.tape(fn, debug=True)
    bench.tape(fn)


def test_ops_that_only_compute_pass(bench: Bench) -> None:
    """Guards the tests below against a guard that refuses everything: temporaries are allowed."""
    table = torch.randn(5, 3)

    def compute(x: torch.Tensor, valid: torch.Tensor) -> None:
        picked = table[valid.clamp(0, 4).long()]
        x.mul_(2.0)[:, :3].add_(torch.where(picked > 0, picked, 0.0).sum() * 0)
        x[torch.arange(len(x)), 0] = torch.cat([x[:1, 1], x[1:, 2]])
        x.masked_fill_(x > 0, 1.0)
        x.new_empty(0).set_(x.untyped_storage(), 0, (2,), (1,))  # as triton's interpreter does

    fn = around(bench, PythonOp("planted", compute))
    plain, watched = (bench.tape(fn, debug=debug) for debug in (False, True))
    assert bits(bench.replay(plain, KEY, 2, 1)) == bits(bench.replay(watched, KEY, 2, 1))


@pytest.mark.parametrize("name", SYNCS)
def test_an_op_that_syncs_is_refused(bench: Bench, name: str) -> None:
    """Guards against an op that waits for its device at each replay, or whose launch is frozen."""
    check_refused(bench, SYNCS[name], "host sync in op planted")


@pytest.mark.parametrize("name", RANDOM)
def test_an_op_that_draws_is_refused(bench: Bench, name: str) -> None:
    """Guards against a generator's state inside a graph (case 19): replays that draw alike."""
    check_refused(bench, RANDOM[name], "draws random numbers in op planted.*counter-based noise")


@pytest.mark.parametrize("name", KEPT)
def test_an_op_that_keeps_memory_is_refused(bench: Bench, name: str) -> None:
    """Guards against memory of a graph's pool that somebody reads behind the graph (case 13)."""
    check_refused(bench, KEPT[name], "op planted keeps memory")


@pytest.mark.parametrize("plant", ["item", "rand", "a list"])
def test_every_replay_is_watched(bench: Bench, plant: str) -> None:
    """Guards against an op that goes wrong for some batches only."""
    mode = host_view(bench.buffers, "mode")
    bad = {**SYNCS, **RANDOM, **KEPT}[plant]
    op = PythonOp("planted", lambda x, valid: bad(x, valid) if mode[0] == 3 else None)
    graph = bench.tape(around(bench, op), debug=True)
    bench.replay(graph, KEY, 2, seed=0)
    bench.buffers.whole("mode").fill_(3)
    with pytest.raises(CaptureError, match="op planted"):
        graph.replay()


@pytest.mark.parametrize("name", RANDOM)
def test_randomness_outside_an_op_is_refused(bench: Bench, name: str) -> None:
    """Guards against noise that is drawn at capture and never again (case 19)."""

    def fn(views: Views) -> None:
        bench.step.norm(views)
        RANDOM[name](views["normed"], views["valid"])

    with pytest.raises(CaptureError, match=r"in a captured step"):
        bench.tape(fn)
    with pytest.raises(CaptureError, match=r"aten.rand.* draws random numbers in a captured step"):
        bench.tape(lambda views: torch.rand(3))


def test_what_moves_the_default_generator_is_refused(bench: Bench) -> None:
    """Guards compiled code, inside which torch's modes do not see."""
    op = CompiledOp("planted", lambda x, valid: x.uniform_())
    with pytest.raises(CaptureError, match="replay has moved the random generator"):
        bench.tape(around(bench, op), debug=True)
    bench.tape(around(bench, CompiledOp("planted", lambda x, valid: x.mul_(2))), debug=True)


def test_compiled_pieces_are_not_run_under_modes() -> None:
    """Guards against modes of torch around compiled code: it runs uncompiled, with other bits."""
    assert isinstance(PieceCompiler("inductor").piece("scale", scale), CompiledOp)
    assert not isinstance(PieceCompiler("off").piece("scale", scale), CompiledOp)
    bench, stacks = make_bench(), []
    for kind in (CompiledOp, PythonOp):
        op = kind("planted", lambda x, valid: stacks.append(_get_current_dispatch_mode_stack()))
        bench.tape(around(bench, op), debug=True)
    assert [len(stack) for stack in stacks] == [0, 1]


def test_allocations_of_a_device_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the rule for CUDA, whose counters are stood in for here."""
    numbers = iter([3, 3, 3, 4])
    monkeypatch.setattr(
        torch.cuda,
        "memory_stats",
        lambda device: {"allocation.all.allocated": next(numbers), "other": 0},
    )
    states = {"now": torch.zeros(16, dtype=torch.uint8)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states["now"].clone())
    device = torch.device("cuda")
    with replay_guard(device):
        pass
    with pytest.raises(CaptureError, match="replay has allocated memory"), replay_guard(device):
        pass
    numbers = iter([3, 3])
    with pytest.raises(CaptureError, match="moved the random generator"), replay_guard(device):
        states["now"][8] = 1


def test_the_guards_end_with_the_replay(bench: Bench) -> None:
    """Guards everything that runs after a refused op."""
    with pytest.raises(CaptureError), op_guard("planted"):
        torch.ones(1).item()
    with pytest.raises(KeyError), op_guard("planted"):
        raise KeyError("in the op")
    assert torch.rand(1).item() < 1
    with replay_guard(CPU):
        assert torch.ones(1).item() == 1
