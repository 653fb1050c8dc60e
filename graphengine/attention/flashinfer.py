"""Attention by FlashInfer's paged prefill kernels (FA2), for GPUs.

Owns which of its wrappers serves a batch, the casts between the engine's fp32 rows and the cache's
dtype, and the opaque op that keeps torch.compile out of it. A wrapper is planned on the host before
every replay (`flashinfer_plan.py`), so the host has to know lengths exactly, and a graph can hold
one forward of a batch, not a chain of them.

Slots up to a request's length must hold finite numbers, unallocated pages (the null block) and
slots behind its drafts included: the kernel multiplies what the mask hides by zero.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from capture.ops import PythonOp
from graphengine.attention.base import AttentionBatch, AttentionShape, HostRows
from graphengine.attention.flashinfer_plan import (
    FLOAT_WORKSPACE_BYTES,
    Fence,
    Passed,
    PlannedWrapper,
    load,
)

Tensor = torch.Tensor

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)
MIN_CAPABILITY = (8, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashInferSizes:
    """What the batches of an engine may come to."""

    cells: frozenset[tuple[int, int]]  # (num_reqs, query_len) that are captured
    # Of any other batch, prefill above all.
    max_num_reqs: int
    max_num_rows: int
    max_blocks: int  # of a request; the width of a block table


def check_supported(dtype: torch.dtype, shape: AttentionShape, device: torch.device) -> None:
    """Whether the kernels serve such heads and such a cache on this device; builds nothing.

    Raises:
        ValueError: they do not, or FlashInfer is missing.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype}: FlashInfer attention serves {_names(DTYPES)}")
    if shape.head_dim not in HEAD_DIMS:
        raise ValueError(
            f"head_dim={shape.head_dim}: FlashInfer attention serves {_names(HEAD_DIMS)}"
        )
    if shape.num_heads % shape.num_kv_heads:
        raise ValueError(
            f"num_heads={shape.num_heads}, num_kv_heads={shape.num_kv_heads}: FlashInfer attention "
            "serves multiples of num_kv_heads"
        )
    if shape.sliding_window is not None:
        # window_left = window - 1 would be the same mask, but its KV tiles start at the window of
        # a tile's first row, so a row's sums would hang on the rows beside it.
        raise ValueError(
            f"sliding_window={shape.sliding_window}: FlashInfer attention serves None alone; with "
            "a window its bits depend on the batch"
        )
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ValueError(f"device={device}: FlashInfer attention needs a CUDA device")
    found = torch.cuda.get_device_capability(device)
    if found < MIN_CAPABILITY:
        raise ValueError(
            f"device={device}: compute capability {found}; FlashInfer attention needs "
            f"{MIN_CAPABILITY} or newer"
        )
    load()


class FlashInferAttention:
    """See the module docstring.

    Batches of a captured cell's shape have a wrapper of their own, made by the first plan of the
    shape. All others share one, whose requests are padded to the most there may be. Both are in
    graph mode: planned freely, FlashInfer would take another q tile for short prompts.

    Args:
        dtype: of the cache.
        shape: of the heads.
        sizes: of batches.
        device: of the tensors.
        workspace: that of another one, whose calls these do not overlap; None: its own.
        make_fence: makes an event of the device; None: one that fits.
    """

    name = "flashinfer"

    def __init__(
        self,
        dtype: torch.dtype,
        shape: AttentionShape,
        sizes: FlashInferSizes,
        *,
        device: torch.device,
        workspace: Tensor | None = None,
        make_fence: Callable[[], Fence] | None = None,
    ) -> None:
        self._dtype, self._shape, self._sizes = dtype, shape, sizes
        self.workspace = (
            torch.zeros(FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            if workspace is None
            else workspace
        )
        self._make_fence = make_fence or (torch.cuda.Event if device.type == "cuda" else Passed)
        cell_rows = [num_reqs * query_len for num_reqs, query_len in sizes.cells]
        rows = max(sizes.max_num_rows, *cell_rows)
        self._q = torch.zeros(rows, shape.num_heads, shape.head_dim, dtype=dtype, device=device)
        self._attended = torch.zeros_like(self._q)
        self._cells: dict[tuple[int, int], PlannedWrapper] = {}
        self._ragged: PlannedWrapper | None = None
        self._latest: tuple[PlannedWrapper, tuple[int, int, int]] | None = None
        handle = next(_handles)
        _backends[handle] = self
        self._op = PythonOp("flashinfer_attention", functools.partial(_launch, handle))

    def plan(self, batch: AttentionBatch, host: HostRows) -> None:
        key = (len(batch.block_table), batch.max_query_len, len(batch.positions))
        assert host.query_start_loc[-1] == key[2], (
            f"{host.query_start_loc[-1]} rows on the host, {key[2]} in the batch"
        )
        wrapper = self._wrapper(*key)
        self._latest = None  # a plan that fails leaves none behind
        wrapper.plan(host)
        self._latest = (wrapper, key)

    def run(self, out: Tensor, qkv: Tensor, kv_cache: Tensor, batch: AttentionBatch) -> None:
        self._op(out, qkv, kv_cache, len(batch.block_table), batch.max_query_len)

    def run_planned(
        self, out: Tensor, qkv: Tensor, kv_cache: Tensor, num_reqs: int, query_len: int
    ) -> None:
        """`run` as the op calls it: of the batch that was planned last, which must be this one."""
        key = (num_reqs, query_len, len(qkv))
        if self._latest is None or self._latest[1] != key:
            planned = None if self._latest is None else self._latest[1]
            raise AssertionError(
                f"FlashInfer: a batch (num_reqs, query_len, rows) = {key} runs, planned was "
                f"{planned}; every run needs its own plan"
            )
        shape, num_rows = self._shape, len(qkv)
        q, attended = self._q[:num_rows], self._attended[:num_rows]
        q.copy_(qkv.view(num_rows, -1, shape.head_dim)[:, : shape.num_heads])
        self._latest[0].run(attended, q, kv_cache)
        out.view(attended.shape).copy_(attended)

    def _wrapper(self, num_reqs: int, query_len: int, num_rows: int) -> PlannedWrapper:
        """The wrapper of batches of this shape."""
        sizes = self._sizes
        cell = (num_reqs, query_len)
        if cell in sizes.cells and num_rows == num_reqs * query_len:
            if cell not in self._cells:
                self._cells[cell] = self._make(num_reqs, num_rows, query_len)
            return self._cells[cell]
        if num_reqs > sizes.max_num_reqs or num_rows > sizes.max_num_rows:
            raise AssertionError(
                f"FlashInfer: {num_reqs} requests of {num_rows} rows; prepared for "
                f"{sizes.max_num_reqs} of {sizes.max_num_rows}"
            )
        if self._ragged is None:
            self._ragged = self._make(sizes.max_num_reqs, sizes.max_num_rows, 1)
        return self._ragged

    def _make(self, num_reqs: int, max_rows: int, query_len: int) -> PlannedWrapper:
        """A wrapper whose requests may reach `query_len - 1` positions past the context."""
        pages = self._sizes.max_blocks + -(-(query_len - 1) // self._shape.block_size)
        return PlannedWrapper(
            self._shape,
            self._dtype,
            num_reqs=num_reqs,
            max_rows=max_rows,
            max_pages=num_reqs * pages,
            workspace=self.workspace,
            make_fence=self._make_fence,
        )


# The step's context: a compiled graph holds a backend's number, and finds its latest plan by it.
_handles = itertools.count()
_backends: weakref.WeakValueDictionary[int, FlashInferAttention] = weakref.WeakValueDictionary()
_library = torch.library.Library("graphengine", "FRAGMENT")
# Defined by hand: torch.library.custom_op would cost a call ten times as much.
_library.define(
    "flashinfer_attention(Tensor(a!) out, Tensor qkv, Tensor kv_cache, "
    "SymInt num_reqs, SymInt query_len, int handle) -> ()"
)


def _launch(
    handle: int, out: Tensor, qkv: Tensor, kv_cache: Tensor, num_reqs: int, query_len: int
) -> None:
    torch.ops.graphengine.flashinfer_attention(out, qkv, kv_cache, num_reqs, query_len, handle)


def _run(
    out: Tensor, qkv: Tensor, kv_cache: Tensor, num_reqs: int, query_len: int, handle: int
) -> None:
    _backends[handle].run_planned(out, qkv, kv_cache, num_reqs, query_len)


def _shapes(
    out: Tensor, qkv: Tensor, kv_cache: Tensor, num_reqs: int, query_len: int, handle: int
) -> None:
    """What the op makes for a compiler: nothing, `out` is written."""


_library.impl("flashinfer_attention", _run, "CompositeExplicitAutograd")
torch.library.register_fake("graphengine::flashinfer_attention", _shapes, lib=_library)


def _names(values: tuple[object, ...]) -> str:
    return ", ".join(str(value).removeprefix("torch.") for value in values)
