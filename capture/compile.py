"""Compiled pieces: small torch functions, compiled once, called as ops.

Owns the use of torch.compile and the count of compile events. A piece writes into its out
arguments and returns nothing. A dimension marked dynamic is compiled once for 2 rows
or more and, where one row is used at all, once for one row, on which torch specialises.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal

import torch

from capture.inductor_cache import InductorCache, cache_hits
from capture.ops import CompiledOp, PythonOp

MAX_DYNAMIC_ROWS = 1 << 24


@dataclass(frozen=True, slots=True)
class CompileEvent:
    """One run of the compiler."""

    piece: str
    seconds: float
    after_warmup: bool
    cache_hit: bool  # found in the on-disk cache, so nothing was generated or built


class PieceCompiler:
    """Makes ops of torch functions, through inductor or (`off`) as they are.

    Every compilation is an event; events after `finish_warmup()` mean that a piece met a shape it
    was not compiled for. The on-disk cache is `inductor/` below `cache_dir()`, whatever
    TORCHINDUCTOR_CACHE_DIR says for other code of the process.
    """

    def __init__(self, mode: Literal["inductor", "off"]) -> None:
        self.mode = mode
        self.events: list[CompileEvent] = []
        self._warm = False
        self._cache = InductorCache() if mode == "inductor" else None

    def piece(
        self, name: str, fn: Callable[..., None], *, dynamic_rows: Sequence[int] = ()
    ) -> PythonOp:
        """Wrap `fn` as an op.

        Args:
            name: for events and tapes.
            fn: torch code that mutates its out arguments.
            dynamic_rows: positions of the tensor arguments whose first dimension varies between
                calls.
        """
        if self._cache is None:
            return PythonOp(name, fn)
        backend = self._backend(name, self._cache)
        many = _compile(fn, backend)
        single = _compile(fn, backend) if dynamic_rows else many

        def call(*args: Any) -> None:
            if dynamic_rows and args[dynamic_rows[0]].shape[0] == 1:
                single(*args)
                return
            if not self._warm:
                for position in dynamic_rows:
                    torch._dynamo.mark_dynamic(args[position], 0, min=2, max=MAX_DYNAMIC_ROWS)
            many(*args)

        return CompiledOp(name, call)

    def finish_warmup(self) -> None:
        self._warm = True

    def _backend(self, name: str, cache: InductorCache) -> Callable[..., Any]:
        inductor = torch._dynamo.lookup_backend("inductor")

        def compile_and_count(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
            start, hits = time.perf_counter(), cache_hits()
            with cache.use():
                compiled = inductor(module, inputs)
            seconds, hit = time.perf_counter() - start, cache_hits() > hits
            self.events.append(CompileEvent(name, seconds, self._warm, hit))
            return compiled

        return compile_and_count


def _compile(fn: Callable[..., None], backend: Callable[..., Any]) -> Callable[..., None]:
    return torch.compile(_own_copy(fn), backend=backend, fullgraph=True, dynamic=False)


def _own_copy(fn: Callable[..., None]) -> Callable[..., None]:
    """The function with a code object of its own.

    Dynamo caches and limits compilations by code object, so pieces of several engines in one
    process would use up each other's limit.
    """
    assert isinstance(fn, FunctionType), f"{fn} is not a plain function"
    copy = FunctionType(
        fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__
    )
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy
