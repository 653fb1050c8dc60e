"""TapeGraph: the CPU's graph. Records a step's op calls with their exact storages, replays them
without its Python.

A recording runs no op. It is taken for two batches, then for garbage in every buffer, and all
recordings must be the same tape: a step that branches on data cannot pass. Runs of native ops
become one program for a native loop; the few Python ops between are called as they are. Owns
recording, lowering, replay and the debug checks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from capture.buffers import StaticBuffers
from capture.checks import CaptureError, capture_guard, op_guard, replay_guard
from capture.graph import StepFn
from capture.ops import Arg, NativeOp, Op, set_recorder
from capture.shapes import ShapeKey

# Runs `num_calls` calls at an address, each as `NativeOp.encode` makes it.
ProgramRunner = Callable[[int, int], None]
_CAPTURABLE = (int, torch.Tensor, type(None))


@dataclass(frozen=True, slots=True)
class TapeCall:
    """One recorded op call."""

    op: Op
    args: tuple[Arg, ...]

    def signature(self) -> tuple[object, ...]:
        """What must agree between recordings: the op, and each argument's storage and layout."""
        return (self.op, *map(_describe, self.args))

    def is_same(self, other: TapeCall) -> bool:
        """Whether their signatures agree; what is one object to both need not be described."""
        if self.op is not other.op or len(self.args) != len(other.args):
            return False
        for mine, theirs in zip(self.args, other.args, strict=True):
            if mine is not theirs and _describe(mine) != _describe(theirs):
                return False
        return True


class Tape:
    """The ordered op calls of one run of a step; a recorder for capture.ops."""

    def __init__(self) -> None:
        self.calls: list[TapeCall] = []

    def record(self, op: Op, args: tuple[Arg, ...]) -> None:
        for index, arg in enumerate(args):
            if not isinstance(arg, _CAPTURABLE):
                raise CaptureError(
                    f"op {op.name}, argument {index}: a {type(arg).__name__} cannot be captured; "
                    f"ops take tensors, integers or None"
                )
        self.calls.append(TapeCall(op, args))

    def check_same(self, other: Tape) -> None:
        """Raises CaptureError naming the first call at which the two tapes differ."""
        for index, (mine, theirs) in enumerate(zip(self.calls, other.calls, strict=False)):
            if not mine.is_same(theirs):
                raise CaptureError(
                    f"the step depends on data: call {index} {_difference(mine, theirs)}"
                )
        if len(self.calls) != len(other.calls):
            raise CaptureError(
                f"the step depends on data: {len(self.calls)} calls for one batch, "
                f"{len(other.calls)} for another"
            )


def record_step(fn: StepFn, buffers: StaticBuffers, views: dict[str, torch.Tensor]) -> Tape:
    """Record one run of the step under the capture guards; nothing is computed.

    Args:
        views: the buffers' views of the cell.

    Raises:
        CaptureError: the step syncs, computes outside ops, or writes an input from the host.
    """
    tape = Tape()
    before = buffers.snapshot(("input",))
    set_recorder(tape)
    try:
        with capture_guard():
            fn(dict(views))
    finally:
        set_recorder(None)
    for name, values in before.items():
        if not torch.equal(buffers.whole(name).view(torch.uint8), values.view(torch.uint8)):
            raise CaptureError(f"the step wrote input {name} from the host; replay would not")
    return tape


def record_checked(
    fn: StepFn, buffers: StaticBuffers, key: ShapeKey, prepare: Callable[[int], None]
) -> Tape:
    """Record the step for two batches and for garbage, and hold the recordings to be the same.

    Leaves every buffer at its fill. Raises CaptureError as `record_step`, and where they differ.
    """
    views = buffers.cell(key)
    prepare(0)
    buffers.clear(("scratch", "output"))
    tape = record_step(fn, buffers, views)
    prepare(1)
    tape.check_same(record_step(fn, buffers, views))
    # What `prepare` leaves alike may not steer the step either. No op runs, so garbage is safe.
    for largest in (False, True):
        buffers.poison(("input", "scratch", "output"), largest=largest)
        tape.check_same(record_step(fn, buffers, views))
    buffers.clear(("input", "scratch", "output"))
    return tape


class TapeGraph:
    """A recorded step.

    Args:
        fn: the step.
        buffers, key: the static storages and the cell whose views the step gets.
        prepare: fills the cell's inputs with plausible values; called with 0 and 1 for two
            different batches.
        run_program: the native loop.
        debug: at every replay check that no storage has moved, poison what the step has to write
            before it, and what nobody may read afterwards (all but outputs) behind it; and hold it
            to `replay_guard`, its Python ops to `op_guard`. Rehearsed once at capture.

    Raises:
        CaptureError: the step syncs, computes outside ops, or depends on data; in debug, what the
            guards of a replay refuse.
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
        tape = record_checked(fn, buffers, key, prepare)
        self._buffers = buffers
        self._addresses = buffers.addresses()
        self._debug = debug
        self._run_program = run_program
        self.calls = tape.calls  # keeps every captured storage alive
        self._signatures = [call.signature() for call in tape.calls] if debug else []
        self._segments = _lower(tape.calls)
        self.num_bytes = sum(
            segment.nbytes for segment in self._segments if isinstance(segment, np.ndarray)
        )
        if debug:
            prepare(0)
            self.replay()
            buffers.clear(("input", "scratch", "output"))

    def replay(self) -> None:
        if not self._debug:
            self._run(_run_plain)
            return
        self._check_addresses()
        self._buffers.poison(("scratch", "output"))
        with replay_guard(self._buffers.device, may_allocate=True):
            self._run(_run_guarded)
        self._buffers.poison(("input", "scratch"))

    def _run(self, run_python: Callable[[TapeCall], None]) -> None:
        for segment in self._segments:
            if isinstance(segment, np.ndarray):
                self._run_program(segment.ctypes.data, len(segment))
            else:
                run_python(segment)

    def _check_addresses(self) -> None:
        addresses = self._buffers.addresses()
        for name, address in self._addresses.items():
            if addresses.get(name) != address:
                raise CaptureError(f"static buffer {name} moved since capture")
        for index, (call, signature) in enumerate(zip(self.calls, self._signatures, strict=True)):
            if call.signature() != signature:
                raise CaptureError(f"a storage of call {index}, {call.op.name}, moved or changed")


def _run_plain(call: TapeCall) -> None:
    call.op.run(*call.args)


def _run_guarded(call: TapeCall) -> None:
    if call.op.is_compiled:
        _run_plain(call)
        return
    with op_guard(call.op.name):
        call.op.run(*call.args)


def _describe(arg: Arg) -> object:
    if isinstance(arg, torch.Tensor):
        return arg.data_ptr(), tuple(arg.shape), arg.stride(), arg.dtype
    return arg


def _difference(mine: TapeCall, theirs: TapeCall) -> str:
    if mine.op is not theirs.op:
        return f"is op {mine.op.name} for one batch and {theirs.op.name} for another"
    if len(mine.args) != len(theirs.args):
        return f"hands {mine.op.name} {len(mine.args)} arguments, or {len(theirs.args)}"
    different = [
        index
        for index, pair in enumerate(zip(mine.args, theirs.args, strict=True))
        if _describe(pair[0]) != _describe(pair[1])
    ]
    return f"hands {mine.op.name} other storages, sizes or numbers as arguments {different}"


def _lower(calls: list[TapeCall]) -> list[np.ndarray | TapeCall]:
    """Merge each run of native calls into one int64 program `[num_calls, WORDS_PER_CALL]`."""
    segments: list[np.ndarray | TapeCall] = []
    run: list[list[int]] = []
    for call in [*calls, None]:
        if call is not None and isinstance(call.op, NativeOp):
            run.append(call.op.encode(call.args))
            continue
        if run:
            segments.append(np.array(run, dtype=np.int64))
            run = []
        if call is not None:
            segments.append(call)
    return segments
