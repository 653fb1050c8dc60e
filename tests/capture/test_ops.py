"""Ops: recorded instead of run, one recorder at a time, arguments that C can take."""

from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest
import torch

from capture.ops import MAX_NATIVE_ARGS, NativeOp, Op, PythonOp, set_recorder, word
from graphengine.kernels import library
from graphengine.kernels.ops import native_op


class Seen:
    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def record(self, op: Op, args: tuple[Any, ...]) -> None:
        self.calls.append((op.name, args))


@pytest.fixture
def seen() -> Iterator[Seen]:
    recorder = Seen()
    set_recorder(recorder)
    try:
        yield recorder
    finally:
        set_recorder(None)


def test_a_recorded_op_does_not_run(seen: Seen) -> None:
    """Guards recording against computing on garbage, which it fills the buffers with."""
    x = torch.ones(3)
    fill = PythonOp("fill", lambda out: out.fill_(5.0))
    argmax, out = native_op("argmax_rows"), torch.full((1,), -1, dtype=torch.int32)
    fill(x)
    argmax(out, x, 1, 3)
    assert x.tolist() == [1, 1, 1]
    assert out.tolist() == [-1]
    assert [name for name, _ in seen.calls] == ["fill", "argmax_rows"]
    assert seen.calls[0][1][0] is x
    set_recorder(None)
    fill(x)
    argmax(out, x, 1, 3)
    assert x.tolist() == [5, 5, 5]
    assert out.tolist() == [0]


def test_a_second_recorder_is_refused_and_the_first_stays(seen: Seen) -> None:
    """Guards against one capture inside another, whose calls would land in the wrong tape."""
    with pytest.raises(AssertionError, match="another recording is in progress"):
        set_recorder(Seen())
    PythonOp("noop", lambda: None)()
    assert [name for name, _ in seen.calls] == ["noop"]


def test_a_recording_is_its_threads_own(seen: Seen) -> None:
    """Guards an engine that serves while another starts: calls that are recorded do not run."""
    x, elsewhere = torch.zeros(3), Seen()
    fill = PythonOp("fill", lambda out: out.fill_(5.0))

    def other_thread() -> None:
        fill(x)
        set_recorder(elsewhere)
        fill(x)
        set_recorder(None)

    thread = Thread(target=other_thread)
    thread.start()
    thread.join()
    assert x.tolist() == [5, 5, 5]
    assert seen.calls == []
    assert [name for name, _ in elsewhere.calls] == ["fill"]
    fill(x)
    assert len(seen.calls) == 1


def test_words_are_addresses_integers_and_zero() -> None:
    x = torch.arange(6, dtype=torch.float32)
    assert word(x) == x.data_ptr()
    assert word(x[2:]) == x.data_ptr() + 2 * 4
    assert (word(None), word(-3), word(True)) == (0, -3, 1)
    with pytest.raises(TypeError, match=r"native argument 1\.5"):
        word(1.5)  # type: ignore[arg-type]


def test_a_native_op_is_called_with_exactly_its_arguments() -> None:
    """Guards against ctypes, which lets extra arguments through, and C, which reads any."""
    op = native_op("argmax_rows")
    out, x = torch.zeros(2, dtype=torch.int32), torch.tensor([[1.0, 3.0], [4.0, 2.0]])
    op(out, x, 2, 2)
    assert out.tolist() == [1, 0]
    for args in ((out, x, 2), (out, x, 2, 2, 0)):
        with pytest.raises(TypeError, match=f"argmax_rows takes 4 arguments, got {len(args)}"):
            op(*args)


@pytest.mark.parametrize("num_args", [0, MAX_NATIVE_ARGS + 1])
def test_more_arguments_than_the_native_loop_passes_are_refused(num_args: int) -> None:
    """Guards against a call that the loop would skip without a word."""
    address = library.address("argmax_rows")
    with pytest.raises(ValueError, match=f"wide has {num_args} arguments; .* 1 to 20"):
        NativeOp("wide", address, num_args)
    assert NativeOp("widest", address, MAX_NATIVE_ARGS).num_args == MAX_NATIVE_ARGS


def test_an_op_without_a_body_says_so() -> None:
    with pytest.raises(AssertionError, match="op bare does not say how it runs"):
        Op("bare")()
