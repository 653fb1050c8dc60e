"""Compiled pieces: small torch functions, compiled once, called as ops.

Owns the use of torch.compile, its on-disk cache and the count of compile events. A piece writes into its out arguments
and returns nothing. Dimensions marked dynamic are compiled for 2 rows or more (torch specialises size 1, and may thread a
single-row reduction differently): callers hand at least two rows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from capture.cache import cache_dir
from capture.ops import PythonOp

MAX_DYNAMIC_ROWS = 1 << 24


@dataclass(frozen=True, slots=True)
class CompileEvent:
    """One run of the compiler."""

    piece: str
    seconds: float
    after_warmup: bool


class PieceCompiler:
    """Makes ops of torch functions, through inductor or (`off`) as they are.

    Every compilation is an event; events after `finish_warmup()` mean that a piece met a shape it was not compiled for.
    """

    def __init__(self, mode: Literal["inductor", "off"]) -> None:
        self.mode = mode
        self.events: list[CompileEvent] = []
        self._warm = False
        if mode == "inductor":
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_dir() / "inductor"))

    def piece(
        self, name: str, fn: Callable[..., None], *, dynamic_rows: Sequence[int] = ()
    ) -> PythonOp:
        """Wrap `fn` as an op.

        Args:
            name: for events and tapes.
            fn: torch code that mutates its out arguments.
            dynamic_rows: positions of the tensor arguments whose first dimension varies between calls.
        """
        if self.mode == "off":
            return PythonOp(name, fn)
        compiled = torch.compile(fn, backend=self._backend(name), fullgraph=True, dynamic=False)

        def call(*args: Any) -> None:
            if not self._warm:
                for position in dynamic_rows:
                    torch._dynamo.mark_dynamic(args[position], 0, min=2, max=MAX_DYNAMIC_ROWS)
            compiled(*args)

        return PythonOp(name, call)

    def finish_warmup(self) -> None:
        self._warm = True

    def _backend(self, name: str) -> Callable[..., Any]:
        inductor = torch._dynamo.lookup_backend("inductor")

        def compile_and_count(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
            start = time.perf_counter()
            compiled = inductor(module, inputs)
            self.events.append(CompileEvent(name, time.perf_counter() - start, self._warm))
            return compiled

        return compile_and_count
