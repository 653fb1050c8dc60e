"""TapeGraph: the CPU's graph. Records a step's op calls with their exact storages, replays them
without its Python.

A recording runs no op. It is taken twice, with different inputs and different garbage in every
other buffer, and both must be the same tape: a step that branches on data cannot pass. Runs of
native ops become one program for a native loop; the few Python ops between are called as they are.
Owns recording, lowering, replay and the debug checks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from capture.buffers import StaticBuffers
from capture.checks import CaptureError, capture_guard
from capture.graph import StepFn
from capture.ops import Arg, NativeOp, Op, set_recorder, word
from capture.shapes import ShapeKey

# Runs `num_calls` encoded calls at an address; each is [function, num_args, args...] padded to
# WORDS_PER_CALL.
ProgramRunner = Callable[[int, int], None]
WORDS_PER_CALL = 22


@dataclass(frozen=True, slots=True)
class TapeCall:
    """One recorded op call."""

    op: Op
    args: tuple[Arg, ...]

    def signature(self) -> tuple[object, ...]:
        """What must agree between two recordings: the op and each argument's storage, shape and
        strides.
        """
        return (
            self.op.name,
            *(
                (arg.data_ptr(), tuple(arg.shape), arg.stride(), arg.dtype)
                if isinstance(arg, torch.Tensor)
                else arg
                for arg in self.args
            ),
        )


class Tape:
    """The ordered op calls of one run of a step; a recorder for capture.ops."""

    def __init__(self) -> None:
        self.calls: list[TapeCall] = []

    def record(self, op: Op, args: tuple[Arg, ...]) -> None:
        self.calls.append(TapeCall(op, args))

    def check_same(self, other: Tape) -> None:
        """Raises CaptureError naming the first call at which the two tapes differ."""
        for index, (mine, theirs) in enumerate(zip(self.calls, other.calls, strict=False)):
            if mine.signature() != theirs.signature():
                raise CaptureError(
                    f"the step depends on data: call {index} is {mine.op.name} for one batch "
                    f"and {theirs.op.name} "
                    f"for another, or has other storages or sizes"
                )
        if len(self.calls) != len(other.calls):
            raise CaptureError(
                f"the step depends on data: {len(self.calls)} calls for one batch, "
                f"{len(other.calls)} for another"
            )


def record_step(fn: StepFn, buffers: StaticBuffers, key: ShapeKey) -> Tape:
    """Record one run of the step under the capture guards; nothing is computed."""
    tape = Tape()
    views = buffers.cell(key)
    set_recorder(tape)
    try:
        with capture_guard():
            fn(views)
    finally:
        set_recorder(None)
    return tape


class TapeGraph:
    """A recorded step.

    Args:
        fn: the step.
        buffers, key: the static storages and the cell whose views the step gets.
        prepare: fills the cell's inputs with plausible values; called with 0 and 1 for two
            different batches.
        run_program: the native loop.
        debug: at every replay check that storages have not moved, and afterwards poison all
            scratch.

    Raises:
        CaptureError: the step syncs, computes outside ops, or depends on data.
    """

    kind = "tape"

    def __init__(
        self,
        fn: StepFn,
        buffers: StaticBuffers,
        key: ShapeKey,
        *,
        prepare: Callable[[int], None],
        run_program: ProgramRunner,
        debug: bool = False,
    ) -> None:
        prepare(0)
        buffers.poison(("scratch", "output"))
        tape = record_step(fn, buffers, key)
        prepare(1)
        buffers.clear(("scratch", "output"))
        tape.check_same(record_step(fn, buffers, key))
        self._buffers = buffers
        self._addresses = buffers.addresses()
        self._debug = debug
        self._run_program = run_program
        self.calls = tape.calls  # keeps every captured storage alive
        self._segments = _lower(tape.calls)
        self.num_bytes = sum(
            segment.nbytes for segment in self._segments if isinstance(segment, np.ndarray)
        )

    def replay(self) -> None:
        if self._debug:
            self._check_addresses()
        for segment in self._segments:
            if isinstance(segment, np.ndarray):
                self._run_program(segment.ctypes.data, len(segment))
            else:
                segment.op.run(*segment.args)
        if self._debug:
            self._buffers.poison(("scratch",))

    def _check_addresses(self) -> None:
        for name, address in self._buffers.addresses().items():
            if address != self._addresses[name]:
                raise CaptureError(f"static buffer {name} moved since capture")


def _lower(calls: list[TapeCall]) -> list[np.ndarray | TapeCall]:
    """Merge each run of native calls into one int64 program `[num_calls, WORDS_PER_CALL]`."""
    segments: list[np.ndarray | TapeCall] = []
    run: list[list[int]] = []
    for call in [*calls, None]:
        if call is not None and isinstance(call.op, NativeOp):
            words = [call.op.address, len(call.args), *map(word, call.args)]
            run.append(words + [0] * (WORDS_PER_CALL - len(words)))
            continue
        if run:
            segments.append(np.array(run, dtype=np.int64))
            run = []
        if call is not None:
            segments.append(call)
    return segments
