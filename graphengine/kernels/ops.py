"""Exported kernels as capture ops, over tensors on CPU.

Owns the edge between tensors and the library: which stored dtypes have kernels, and the check of
layout that C cannot make. Knows nothing of what a kernel is used for.
"""

from __future__ import annotations

import torch

from capture.ops import NativeOp
from graphengine.kernels import library

_SUFFIX = {torch.bfloat16: "bf16", torch.float32: "f32"}


def native_op(name: str) -> NativeOp:
    """The op of an exported kernel."""
    return NativeOp(name, library.address(name), len(library.FUNCTIONS[name].arguments))


def kernel_suffix(dtype: torch.dtype) -> str:
    """Suffix of the kernels for a stored dtype.

    Raises:
        ValueError: there are none for it.
    """
    if dtype not in _SUFFIX:
        raise ValueError(f"dtype {dtype} has no CPU kernels; use bfloat16 or float32")
    return _SUFFIX[dtype]


def check_contiguous(*tensors: torch.Tensor) -> None:
    # A capture's guard would be asked about every attribute, which is most of what a start costs.
    with torch._C.DisableTorchFunction():
        for tensor in tensors:
            assert tensor.is_contiguous(), (
                f"kernel argument of shape {tuple(tensor.shape)} is not contiguous"
            )
            assert tensor.is_cpu, f"kernel argument on {tensor.device}; these kernels are the CPU's"
