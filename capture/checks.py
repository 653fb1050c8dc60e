"""Guards of the capture contract: what a step may not do while it is captured, or replayed.

A step's Python runs only at capture. So while it runs, nothing may read data back to the host,
branch on data, or compute outside an op: replay would not see it. At replay, in debug mode, an op
may not sync, draw random numbers or keep memory, nor a whole graph allocate or move a generator.
Owns the torch modes that enforce this. Knows nothing of tapes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CaptureError(RuntimeError):
    """The step broke the capture contract; the message says which rule and where."""


_SYNCS = {
    torch.Tensor.item: "item()",
    torch.Tensor.tolist: "tolist()",
    torch.Tensor.numpy: "numpy()",
    torch.Tensor.cpu: "cpu()",
    torch.Tensor.__repr__: "printing a tensor",
    torch.Tensor.__format__: "printing a tensor",
    torch.Tensor.__bool__: "a Python branch on a tensor",
    torch.Tensor.__int__: "int(tensor)",
    torch.Tensor.__float__: "float(tensor)",
    torch.Tensor.__index__: "a tensor used as an index",
    torch.Tensor.__array__: "numpy conversion",
    torch.Tensor.__dlpack__: "dlpack conversion",
}


class _NoSync(TorchFunctionMode):
    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        what = _SYNCS.get(func)
        if what is not None:
            raise CaptureError(f"host sync in {self._where}: {what}; keep the value on the device")
        return func(*args, **kwargs) if kwargs else func(*args)


class _Watch(TorchDispatchMode):
    """Refuses what neither a step nor one of its ops may do."""

    def __init__(self, where: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._where = where

    def check(self, func: torch._ops.OpOverload[..., Any]) -> None:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default):
            raise CaptureError(f"host sync in {self._where}: a tensor's value was read")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise CaptureError(
                f"{func} draws random numbers in {self._where}: a graph would capture the "
                "generator's state; use counter-based noise"
            )


class _NoCompute(_Watch):
    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.check(func)
        # Views only rename storage. lift_fresh, a view by its schema, is how new tensors appear.
        if not func.is_view or func is torch.ops.aten.lift_fresh.default:
            raise CaptureError(
                f"{func} computes outside an op in a captured step: replay would not repeat "
                "it; make it an op"
            )
        return func(*args, **(kwargs or {}))


class _OpWatch(_Watch):
    """Lets an op compute, and knows what memory it has taken."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.taken: list[StorageWeakRef] = []

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.check(func)
        if _reads_sizes(func, args):
            raise CaptureError(
                f"host sync in {self._where}: {func}, whose sizes depend on data; use a mask"
            )
        given = {storage.data_ptr() for storage in _storages([args, kwargs])}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage.nbytes() and storage.data_ptr() not in given:
                self.taken.append(StorageWeakRef(storage))
        return result

    def is_kept(self) -> bool:
        """Whether some of it is still there."""
        if all(storage.expired() for storage in self.taken):
            return False
        gc.collect()  # what only knows itself is not kept
        return not all(storage.expired() for storage in self.taken)


_INDEXING = (
    torch.ops.aten.index,
    torch.ops.aten.index_put,
    torch.ops.aten.index_put_,
    torch.ops.aten._index_put_impl_,
)


def _reads_sizes(func: torch._ops.OpOverload[..., Any], args: Sequence[Any]) -> bool:
    """Whether a device would have to tell the host how much there is."""
    if func.overloadpacket in _INDEXING:
        return any(one.dtype in (torch.bool, torch.uint8) for one in _tensors(args[1]))
    return torch.Tag.dynamic_output_shape in func.tags


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    given = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.UntypedStorage)]
    return [*given, *(tensor.untyped_storage() for tensor in _tensors(tree))]


@contextmanager
def capture_guard() -> Iterator[None]:
    """While entered, reading a tensor back and computing with torch both raise CaptureError.

    Ops are recorded, not run, while a step is captured, so whatever torch sees is outside an op.
    """
    where = "a captured step"
    with _NoSync(where), _NoCompute(where):
        yield


@contextmanager
def op_guard(name: str) -> Iterator[None]:
    """While an op of Python runs at replay: no sync, no random numbers, no memory that it keeps.

    A CUDA graph would replay none of the three. Torch's modes make compiled code run uncompiled,
    with other bits, so compiled ops are not run under it: `fullgraph=True` leaves no sync in them.
    """
    where = f"op {name}"
    watch = _OpWatch(where)
    with _NoSync(where), watch:
        yield
    for generation in range(3):  # cycles, of triton's interpreter for one, are nobody's
        if watch.is_kept():
            gc.collect(generation)
    if watch.is_kept():
        raise CaptureError(
            f"{where} keeps memory that it has allocated: a graph's is its own; hand it a buffer"
        )


@contextmanager
def replay_guard(device: torch.device, *, may_allocate: bool = False) -> Iterator[None]:
    """Around a replay: it allocates nothing on the device and leaves its generator as it was.

    A tape's ops may allocate, for the time of a call: they are called, not replayed.

    On CPU, where memory is anybody's, `op_guard` has the allocations. Other threads must not use
    the device's allocator or generator meanwhile.
    """
    allocations, generator = _num_allocations(device), _generator_state(device)
    yield
    if not may_allocate and _num_allocations(device) != allocations:
        raise CaptureError("replay has allocated memory: nothing may, behind capture")
    if not torch.equal(_generator_state(device), generator):
        raise CaptureError(
            "replay has moved the random generator: its state was captured; use counter-based noise"
        )


def _num_allocations(device: torch.device) -> int:
    """Since the start of the process."""
    if device.type != "cuda":
        return 0
    number: int = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    return number


def _generator_state(device: torch.device) -> torch.Tensor:
    """Of the device's default generator; kept by the host, so that reading it is no sync."""
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()
