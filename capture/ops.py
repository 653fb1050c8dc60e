"""Ops: the leaves of a captured step.

An op writes into tensors that it is handed, returns nothing and keeps nothing, so a call is fully
described by the op and its arguments' storages. That is what a tape records. Owns the two kinds of
op (native function, Python callable), the encoding of a native call, and the hook by which a
recorder sees the calls; knows nothing of what the ops compute.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Protocol

import torch

Arg = torch.Tensor | int | None
# The one format of a recorded native call: [address, number of arguments, arguments, zeros]. The
# native loop is compiled with the same maximum.
MAX_NATIVE_ARGS = 20
WORDS_PER_CALL = 2 + MAX_NATIVE_ARGS


class Recorder(Protocol):
    def record(self, op: Op, args: tuple[Arg, ...]) -> None:
        """Called instead of running the op."""


class _Recording(threading.local):
    """A thread's own: an engine that is captured in one thread must not swallow the calls of an
    engine that serves in another.
    """

    recorder: Recorder | None = None


_recording = _Recording()


def set_recorder(recorder: Recorder | None) -> None:
    """Install (or remove) the one recorder that sees every op call of this thread."""
    assert recorder is None or _recording.recorder is None, "another recording is in progress"
    _recording.recorder = recorder


class Op:
    """A named leaf. Subclasses say how it runs."""

    __slots__ = ("name",)
    is_compiled = False  # code that torch's compiler has made

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Arg) -> None:
        recorder = _recording.recorder
        if recorder is not None:
            recorder.record(self, args)
            return
        self.run(*args)

    def run(self, *args: Arg) -> None:
        raise AssertionError(f"op {self.name} does not say how it runs")


class NativeOp(Op):
    """A C function of 1 to 20 pointers or int64s: a call is an address and a row of words.

    Raises:
        ValueError: a number of arguments that the native loop cannot pass.
    """

    __slots__ = ("_function", "address", "num_args")

    def __init__(self, name: str, address: int, num_args: int) -> None:
        super().__init__(name)
        if not 1 <= num_args <= MAX_NATIVE_ARGS:
            raise ValueError(
                f"native op {name} has {num_args} arguments; the native loop passes 1 to "
                f"{MAX_NATIVE_ARGS}: pack the rest into a tensor"
            )
        self.address = address
        self.num_args = num_args
        self._function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * num_args)(address)

    def run(self, *args: Arg) -> None:
        self._function(*self.words(args))

    def words(self, args: tuple[Arg, ...]) -> list[int]:
        """A call's arguments as int64 words.

        Raises:
            TypeError: another number of arguments than the C function has, or one of another kind.
        """
        if len(args) != self.num_args:
            raise TypeError(f"op {self.name} takes {self.num_args} arguments, got {len(args)}")
        return [word(arg) for arg in args]

    def encode(self, args: tuple[Arg, ...]) -> list[int]:
        """A call as WORDS_PER_CALL int64 words, as the native loop reads it; raises as `words`."""
        call = [self.address, self.num_args, *self.words(args)]
        return call + [0] * (WORDS_PER_CALL - len(call))


class PythonOp(Op):
    """A Python callable that writes into its out arguments: torch code, or launches of kernels."""

    __slots__ = ("_function",)

    def __init__(self, name: str, function: Callable[..., None]) -> None:
        super().__init__(name)
        self._function = function

    def run(self, *args: Arg) -> None:
        self._function(*args)


class CompiledOp(PythonOp):
    """One that runs compiled code, torch's or Triton's, which torch's modes cannot watch."""

    __slots__ = ()
    is_compiled = True


def word(arg: Arg) -> int:
    """An argument of a native call as an int64: an address, the integer, or 0 for None."""
    if isinstance(arg, torch.Tensor):
        return arg.data_ptr()
    if arg is None:
        return 0
    if not isinstance(arg, int):
        raise TypeError(f"native argument {arg!r}: expected a tensor, an integer or None")
    return arg
