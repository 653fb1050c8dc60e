"""One FlashInfer wrapper in graph mode, over static buffers of a fixed number of requests.

Owns what is planned on the host before a replay: page lists, the recipe that gives a row the same
bits in every plan, and the guards. A graph keeps the launch that the first plan led to (q tile,
grid, addresses), so a later plan that came to another one would be garbage; it is an error here.
Knows nothing of cells, rows' values or the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch

from graphengine.attention.base import AttentionShape, HostRows, IntArray

Tensor = torch.Tensor

VERSION = "0.7.4"  # the one that the recipe was read from and the contract tests hold
# Launches that start before the one before them has ended. Off: nothing is known of their price,
# and they are the first thing to suspect where bits differ.
ENABLE_PDL = False
# Of a wrapper's schedule, which is 13 bytes a q tile; the planner raises where they do not suffice.
INT_WORKSPACE_BYTES = 256 << 10
# Room for partial results of split-KV, which the recipe switches off.
FLOAT_WORKSPACE_BYTES = 1 << 10
# Above so many rows times heads of a group in the longest request it must allow for, FlashInfer
# takes its largest q tile.
SMALL_TILE_ROWS = 64
# Places in the plan that the launch is made from, and what the recipe gives there.
PLAN_INFO_LENGTH, PLAN_INFO_TILE, PLAN_INFO_SPLIT = 15, 3, 14


class Fence(Protocol):
    """A place in a stream; torch.cuda.Event is one."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...


class Passed:
    """The fence of a device that does nothing later."""

    def record(self) -> None:
        """Nothing is under way."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


def load() -> ModuleType:
    """FlashInfer, imported on first use: it is optional and takes seconds.

    Raises:
        ValueError: it is missing, or another version than the one that this is written for.
    """
    install = f"`make setup-cuda` installs flashinfer-python {VERSION}"
    try:
        import flashinfer
    except ImportError as error:
        raise ValueError(f"flashinfer-python is not installed ({error}); {install}") from error
    if flashinfer.__version__ != VERSION:
        raise ValueError(
            f"flashinfer-python {flashinfer.__version__} is installed, only {VERSION} is "
            f"supported; {install}"
        )
    module: ModuleType = flashinfer
    return module


def q_tile(head_dim: int) -> int:
    """Rows times heads of a group that one program serves, with the capacity below."""
    return 128 if head_dim < 256 else 64


def capacity(num_reqs: int, num_rows: int, group_size: int) -> int:
    """Rows that every plan of a wrapper allows for (`max_total_num_rows`).

    FlashInfer sizes its q tile for a request of `capacity - num_reqs + 1` rows, whatever the batch
    is. The order in which a row's keys are summed hangs on that tile, so it has to be the same one
    for 1 row a request, for k + 1 and for a prompt: the largest.

    Args:
        num_rows: the most that a batch has.
        group_size: query heads of a KV head.
    """
    return max(num_rows, num_reqs - 1 + -(-(SMALL_TILE_ROWS + 1) // group_size))


@dataclass(frozen=True, slots=True)
class PageLists:
    """A batch as FlashInfer reads it; all int32."""

    qo_indptr: IntArray  # [num_reqs + 1]
    kv_indptr: IntArray  # [num_reqs + 1] into `indices`
    indices: IntArray  # [kv_indptr[-1]] blocks
    last_page_len: IntArray  # [num_reqs] 1 to block_size; 0: no pages

    @classmethod
    def of(cls, host: HostRows, num_reqs: int, block_size: int) -> PageLists:
        """Pages of each request up to its last row.

        Requests beyond those of the batch have no rows and no pages. Pages beyond a table's width
        (tail rows at the context limit) are the null block, as unallocated ones are.
        """
        live, width = host.block_table.shape
        rows = np.diff(host.query_start_loc)
        assert (host.seq_lens >= rows).all(), (
            f"lengths {host.seq_lens.tolist()} below rows {rows.tolist()}: the causal mask is "
            "aligned to the end of both"
        )
        lens = np.zeros(num_reqs, dtype=np.int32)
        lens[:live] = host.seq_lens
        pages = -(-lens // block_size)
        table = host.block_table
        if pages.max() > width:
            table = np.pad(table, ((0, 0), (0, int(pages.max()) - width)))
        indices = table[np.arange(table.shape[1]) < pages[:live, None]]
        qo_indptr = np.full(num_reqs + 1, host.query_start_loc[-1], dtype=np.int32)
        qo_indptr[: live + 1] = host.query_start_loc
        kv_indptr = np.zeros(num_reqs + 1, dtype=np.int32)
        np.cumsum(pages, out=kv_indptr[1:])
        last = lens - np.maximum(pages - 1, 0) * block_size
        return cls(qo_indptr, kv_indptr, indices.astype(np.int32, copy=False), last)


class PlannedWrapper:
    """See the module docstring.

    Args:
        shape: of the heads.
        dtype: of q, cache and output.
        num_reqs: of every batch, padding included.
        max_rows: of a batch.
        max_pages: of all requests of a batch.
        workspace: FlashInfer's float workspace, on the device; shared in stream order.
        make_fence: makes an event of the device.
    """

    def __init__(
        self,
        shape: AttentionShape,
        dtype: torch.dtype,
        *,
        num_reqs: int,
        max_rows: int,
        max_pages: int,
        workspace: Tensor,
        make_fence: Callable[[], Fence],
    ) -> None:
        self._shape, self._dtype = shape, dtype
        self._num_reqs, self._max_pages = num_reqs, max_pages
        self._capacity = capacity(num_reqs, max_rows, shape.num_heads // shape.num_kv_heads)
        device = workspace.device
        sizes = (num_reqs + 1, num_reqs + 1, max_pages, num_reqs)
        pinned = device.type == "cuda"
        self._host = [torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for size in sizes]
        self._device = [torch.zeros(size, dtype=torch.int32, device=device) for size in sizes]
        qo_indptr, kv_indptr, indices, last_page_len = self._device
        self._wrapper: Any = load().BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=qo_indptr,
            paged_kv_indptr_buf=kv_indptr,
            paged_kv_indices_buf=indices,
            paged_kv_last_page_len_buf=last_page_len,
            backend="fa2",
            max_total_num_rows=self._capacity,
        )
        self._wrapper.reset_workspace_buffer(
            workspace, torch.zeros(INT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        )
        self._planned = make_fence()
        self._plan_info: list[int] | None = None  # of the first plan: what graphs have captured

    def plan(self, host: HostRows) -> None:
        """Write the batch and its schedule to the device, in stream order; reads nothing back.

        Raises:
            AssertionError: the batch does not fit, or leads to another launch than the first one.
        """
        shape = self._shape
        lists = PageLists.of(host, self._num_reqs, shape.block_size)
        num_rows, num_pages = int(lists.qo_indptr[-1]), len(lists.indices)
        _check(
            num_rows <= self._capacity and num_pages <= self._max_pages,
            f"{num_rows} rows and {num_pages} pages; a wrapper of {self._num_reqs} requests has "
            f"room for {self._capacity} and {self._max_pages}",
        )
        # The latest copies out of host memory, ours and the wrapper's own, may still be under way.
        self._planned.synchronize()
        qo_indptr, kv_indptr, indices, last_page_len = self._host
        qo_indptr.numpy()[:] = lists.qo_indptr
        kv_indptr.numpy()[:] = lists.kv_indptr
        indices.numpy()[:num_pages] = lists.indices
        last_page_len.numpy()[:] = lists.last_page_len
        pages = self._device[2][:num_pages]
        pages.copy_(indices[:num_pages], non_blocking=True)
        self._wrapper.plan(
            qo_indptr,
            kv_indptr,
            pages,
            last_page_len,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.block_size,
            causal=True,  # aligned to the end of rows and keys: the chain mask
            sm_scale=shape.head_dim**-0.5,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            o_data_type=self._dtype,
            disable_split_kv=True,  # where the keys are split hangs on the rest of the batch
        )
        self._planned.record()
        self._check_launch()

    def run(self, out: Tensor, q: Tensor, kv_cache: Tensor) -> None:
        """out [T, heads, dim] of q [T, heads, dim], both in the cache's dtype; captured.

        T is the number of rows of the latest plan.
        """
        self._wrapper.run(q, kv_cache, out=out, enable_pdl=ENABLE_PDL)

    def _check_launch(self) -> None:
        """Hold the latest plan to the recipe and to the first one."""
        info = [int(number) for number in self._wrapper._plan_info]
        if self._plan_info is None:
            tile = q_tile(self._shape.head_dim)
            _check(
                len(info) == PLAN_INFO_LENGTH
                and info[PLAN_INFO_TILE] == tile
                and not info[PLAN_INFO_SPLIT],
                f"the plan {info} has another q tile than {tile} or splits the keys: a row's bits "
                "would depend on its batch",
            )
            self._plan_info = info
        _check(
            info == self._plan_info,
            f"the plan changed from {self._plan_info} to {info}: graphs captured with the first "
            "one would compute garbage",
        )


def _check(holds: bool, message: str) -> None:
    """An assertion that python -O keeps: what it guards against would go unseen."""
    if not holds:
        raise AssertionError(f"FlashInfer: {message}")
