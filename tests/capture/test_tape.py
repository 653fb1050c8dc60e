"""TapeGraph: the recorded step, replayed without its Python, equals the step."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from capture.ops import WORDS_PER_CALL, NativeOp, PythonOp
from capture.shapes import ShapeKey
from capture.tape import TapeCall, TapeGraph
from graphengine.kernels import library
from tests.capture.helpers import (
    KEY,
    TIER,
    Bench,
    Views,
    bits,
    fill_inputs,
    make_bench,
)


@pytest.fixture
def bench() -> Bench:
    return make_bench()


@pytest.mark.parity
@pytest.mark.parametrize("key", [KEY, ShapeKey(1, 1, TIER), ShapeKey(8, 4, TIER)])
@pytest.mark.parametrize("debug", [False, True])
def test_replays_equal_the_step_bit_for_bit(bench: Bench, key: ShapeKey, debug: bool) -> None:
    graph = bench.tape(key=key, debug=debug)
    for seed in range(4):
        expected = bench.eager(key, key.num_reqs, seed)
        bench.buffers.poison(("scratch", "output"))
        assert bits(bench.replay(graph, key, key.num_reqs, seed)) == bits(expected)
    assert not expected["logits"].isnan().any()


def test_replay_runs_none_of_the_step(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the point of a tape: the model's Python is gone from the decode path."""
    graph = bench.tape()
    expected = bench.eager(KEY, 2, seed=3)
    calls = bench.step.calls

    def raises(*args: Any) -> None:
        raise AssertionError("the step's Python ran at replay")

    for name in ("__call__", "norm", "rest"):
        monkeypatch.setattr(type(bench.step), name, raises)
    assert bits(bench.replay(graph, KEY, 2, seed=3)) == bits(expected)
    assert bench.step.calls == calls


def test_recording_runs_no_op(bench: Bench) -> None:
    """Guards against ops that compute on the garbage that recordings are made over."""
    ran: list[str] = []
    probe = PythonOp("probe", lambda x: ran.append("probe"))

    def fn(views: Views) -> None:
        probe(views["x"])
        bench.step(views)

    graph = bench.tape(fn)
    assert ran == []
    graph.replay()
    assert ran == ["probe"]


def test_after_capture_every_buffer_holds_its_fill(bench: Bench) -> None:
    """Guards against the garbage of recordings in a buffer that the host fills in part."""
    bench.tape()
    for name, spec in bench.buffers.specs.items():
        assert bench.buffers.whole(name).eq(spec.fill).all(), name


def test_a_mixed_tape_keeps_its_order(bench: Bench) -> None:
    """Guards lowering: runs of native calls around python calls, in the order of the step."""
    graph = bench.tape()
    names = [call.op.name for call in graph.calls]
    assert names == ["rms_norm", "linear_f32", "double", "argmax_rows", "sum_requests"]
    lengths = [
        len(segment) if isinstance(segment, np.ndarray) else segment.op.name
        for segment in graph._segments
    ]
    assert lengths == [2, "double", 1, "sum_requests"]


@pytest.mark.parametrize(
    "order", ["n", "p", "nn", "pp", "np", "pn", "npn", "pnp", "nnppn", "pnnp", ""]
)
def test_every_mix_of_native_and_python_runs_in_order(bench: Bench, order: str) -> None:
    """Guards the seams of lowering: first, last, single and empty runs."""
    log: list[tuple[str, int]] = []

    def run_program(address: int, num_calls: int) -> None:
        for index in range(num_calls):
            words = np.ctypeslib.as_array(
                (np.ctypeslib.ctypes.c_int64 * WORDS_PER_CALL).from_address(
                    address + index * WORDS_PER_CALL * 8
                )
            )
            log.append(("n", int(words[3])))
            assert words[:2].tolist() == [native.address, 2]
            assert not words[4:].any()

    native = NativeOp("native", library.address("rms_norm"), 2)
    python = PythonOp("python", lambda x, number: log.append(("p", number)))

    def fn(views: Views) -> None:
        for number, kind in enumerate(order):
            (native if kind == "n" else python)(views["x"], number)

    graph = TapeGraph(fn, bench.buffers, KEY, prepare=lambda variant: None, run_program=run_program)
    graph.replay()
    assert log == [(kind, number) for number, kind in enumerate(order)]


def test_a_program_holds_each_call_as_its_op_encodes_it(bench: Bench) -> None:
    """Guards the one format that the tape writes and the native loop reads."""
    graph = bench.tape()
    program = graph._segments[0]
    assert isinstance(program, np.ndarray)
    call: TapeCall = graph.calls[1]
    assert isinstance(call.op, NativeOp)
    assert program[1].tolist() == call.op.encode(call.args)
    assert graph.num_bytes == 3 * WORDS_PER_CALL * 8


def test_a_tape_keeps_its_storages_alive(bench: Bench) -> None:
    """Guards against a program of raw addresses whose memory somebody else got."""
    graph = bench.tape()
    expected = bits(bench.eager(KEY, 2, seed=1))
    weight = weakref.ref(bench.step.weight)
    bench.step.weight = torch.zeros(1)
    gc.collect()
    assert weight() is not None
    junk = [torch.full((24, 16), 9.0) for _ in range(8)]
    assert bits(bench.replay(graph, KEY, 2, seed=1)) == expected
    del graph, junk
    gc.collect()
    assert weight() is None


def test_a_tape_outlives_the_buffers_object() -> None:
    bench = make_bench()
    graph = bench.tape()
    views = bench.buffers.cell(KEY)
    fill_inputs(bench.buffers, KEY, 2, seed=1)
    bench.buffers.release()
    graph.replay()
    assert not views["logits"].eq(0).all()


def test_cells_share_storages_and_do_not_disturb_each_other(bench: Bench) -> None:
    """Guards dispatch back and forth between cells over one set of buffers."""
    keys = [ShapeKey(8, 4, TIER), KEY, ShapeKey(1, 1, TIER)]
    graphs = {key: bench.tape(key=key) for key in keys}
    for seed, key in enumerate([*keys, *reversed(keys), *keys]):
        expected = bits(bench.eager(key, key.num_reqs, seed))
        assert bits(bench.replay(graphs[key], key, key.num_reqs, seed)) == expected


def test_replay_reads_live_inputs_not_those_of_capture(bench: Bench) -> None:
    graph = bench.tape()
    first = bits(bench.replay(graph, KEY, 2, seed=1))
    assert bits(bench.replay(graph, KEY, 2, seed=2)) != first
    assert bits(bench.replay(graph, KEY, 2, seed=1)) == first
