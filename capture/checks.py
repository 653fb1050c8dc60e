"""Guards of the capture contract: what a step may not do while it is captured.

A step's Python runs only at capture. So while it runs, nothing may read data back to the host,
branch on data, or compute outside an op: replay would not see it. Owns the two torch modes that
enforce this. Knows nothing of tapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


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
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        what = _SYNCS.get(func)
        if what is not None:
            raise CaptureError(
                f"host sync in a captured step: {what}; keep the value on the device"
            )
        return func(*args, **(kwargs or {}))


class _NoCompute(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise CaptureError("host sync in a captured step: a tensor's value was read")
        # Views only rename storage. lift_fresh, a view by its schema, is how new tensors appear.
        if not func.is_view or func is torch.ops.aten.lift_fresh.default:
            raise CaptureError(
                f"{func} computes outside an op in a captured step: replay would not repeat "
                "it; make it an op"
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def no_sync() -> Iterator[None]:
    """While entered, reading a tensor back raises CaptureError."""
    with _NoSync():
        yield


@contextmanager
def capture_guard() -> Iterator[None]:
    """While entered, reading a tensor back and computing with torch both raise CaptureError.

    Ops are recorded, not run, while a step is captured, so whatever torch sees is outside an op.
    """
    with _NoSync(), _NoCompute():
        yield
