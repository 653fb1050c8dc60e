"""KernelSpec: what a kernel is compiled with, so that it can be compiled where there is no GPU.

Every module of this package lists its kernels as `COMPILED`; `compile_check.py` reads that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class KernelSpec:
    """One specialisation of a kernel, with the sizes of a real model."""

    name: str  # what the check prints
    kernel: Any  # decorated by triton.jit
    signature: Mapping[str, str]  # argument -> "*bf16", "*fp32", "*i32", "i32", "fp32"
    constants: Mapping[str, object]  # constexpr argument -> value
    options: Mapping[str, int] = field(default_factory=dict)  # num_warps, num_stages of the launch
