"""A plain copy of more memory than any cache holds: the bandwidth that other kernels are held to.

Owns one Triton kernel, under a name of its own, so that a report shows it beside the kernels of a
step. torch's own copy is no kernel but a transfer, and does not appear there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_BYTES = 1 << 30  # read, and as many written
BLOCK = 4096  # elements of 4 bytes to a program


@triton.jit
def copy_ceiling(out, x, count, BLOCK: tl.constexpr):
    """out[i] = x[i] for i < count."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < count), mask=at < count)


def copy(out: Tensor, x: Tensor) -> None:
    """Copy x [n] fp32 to out [n] by one launch."""
    copy_ceiling[(triton.cdiv(x.numel(), BLOCK),)](out, x, x.numel(), BLOCK=BLOCK)


def make_copy(device: torch.device, num_bytes: int = NUM_BYTES) -> Callable[[], None]:
    """A call that copies `num_bytes` on the device."""
    x = torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)
    return partial(copy, torch.empty_like(x), x)
