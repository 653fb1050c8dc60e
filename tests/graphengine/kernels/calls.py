"""The kernel library called with tensors, and the reference backend over the same ones.

Owns only what the kernel tests share. Every method allocates its output, filled with NaN, so that a
value the kernel forgot to write cannot pass.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from graphengine.attention.base import AttentionBatch, AttentionShape
from graphengine.attention.reference import ReferenceAttention

SUFFIX = {torch.bfloat16: "bf16", torch.float32: "f32"}


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Runs the block with `count` OpenMP threads (torch's pool is the kernels' pool)."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    if dtype.is_floating_point:
        return torch.full(shape, float("nan"), dtype=dtype)
    return torch.full(shape, -1, dtype=dtype)


def words(*arguments: Tensor | int | None) -> list[int]:
    """Addresses and integers as the kernels take them."""
    out = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            assert argument.is_contiguous(), "a kernel takes contiguous tensors"
            out.append(argument.data_ptr())
        else:
            out.append(argument or 0)
    return out


def eps(value: float = 1e-5) -> Tensor:
    return torch.tensor([value])


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """A paged cache with its queries: what attention reads, for R requests of ragged rows."""

    # [T, (Hq + 2 * Hkv) * D]
    qkv: Tensor
    # [num_blocks, 2, block_size, Hkv, D]
    cache: Tensor
    # [R, table_stride]
    block_table: Tensor
    # [R + 1]
    query_start_loc: Tensor
    # [T]
    positions: Tensor
    num_heads: int
    window: int = 0

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Hq, Hkv, D, block_size."""
        return self.num_heads, self.cache.shape[3], self.cache.shape[4], self.cache.shape[2]


class Kernels:
    """One bound library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def operand(self, x: Tensor, w: Tensor) -> Tensor:
        """The rows of x as a product with w takes them."""
        rounds = w.dtype is torch.bfloat16 and self.library.rounds_activations()
        return x.bfloat16().float() if rounds else x

    def call(self, name: str, *arguments: Tensor | int | None) -> None:
        getattr(self.library, name)(*words(*arguments))

    def linear(
        self, x: Tensor, w: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        (m, k), n = x.shape, w.shape[0]
        out = empty(m, n) if residual is None else residual.clone()
        accumulate = int(residual is not None)
        self.call(f"linear_{SUFFIX[w.dtype]}", out, x, w, bias, m, n, k, accumulate)
        return out

    def gate_up(self, x: Tensor, w: Tensor) -> Tensor:
        (m, k), i = x.shape, w.shape[0] // 2
        out = empty(m, i)
        self.call(f"gate_up_{SUFFIX[w.dtype]}", out, x, w, m, i, k)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float = 1e-5) -> Tensor:
        out = empty(*x.shape)
        self.call("rms_norm", out, x, weight, *x.shape, eps(epsilon))
        return out

    def embed(self, table: Tensor, ids: Tensor) -> Tensor:
        out = empty(len(ids), table.shape[1])
        self.call(f"embed_{SUFFIX[table.dtype]}", out, table, ids, len(ids), table.shape[1])
        return out

    def argmax(self, logits: Tensor) -> Tensor:
        out = empty(logits.shape[0], dtype=torch.int32)
        self.call("argmax_rows", out, logits, *logits.shape)
        return out

    def attention(self, context: Context, scratch_floats: int = 1 << 20) -> Tensor:
        """`scratch_floats=0` leaves only the walking schedule."""
        num_heads, kv_heads, head_dim, block_size = context.shape
        out = empty(len(context.positions), num_heads * head_dim)
        self.call(
            f"paged_attention_{SUFFIX[context.cache.dtype]}",
            out,
            context.qkv,
            context.cache,
            context.block_table,
            context.query_start_loc,
            context.positions,
            *context.block_table.shape,
            num_heads,
            kv_heads,
            head_dim,
            block_size,
            context.window,
            empty(max(scratch_floats, 1)),
            scratch_floats,
        )
        return out


def reference_attention(context: Context) -> Tensor:
    """What `attention` should give, in float64."""
    num_heads, kv_heads, head_dim, block_size = context.shape
    shape = AttentionShape(
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        sliding_window=context.window or None,
    )
    longest = int(context.query_start_loc.diff().max())
    batch = AttentionBatch(context.block_table, context.query_start_loc, context.positions, longest)
    out = empty(len(context.positions), num_heads * head_dim, dtype=torch.float64)
    ReferenceAttention(shape).run(out, context.qkv, context.cache, batch)
    return out
