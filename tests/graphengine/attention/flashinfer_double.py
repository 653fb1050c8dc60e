"""FlashInfer on CPU: the installed wrapper, over a double of the compiled module below it.

`NativeDouble` is handed what the C++ planner and the kernel would be: it records the planner's
arguments by the names that the installed source gives them, answers as the planner does, and
computes attention by the project's reference from the wrapper's own buffers, so that page lists,
lengths and the mask mean what FlashInfer reads in them. Everything above it is the real package.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flashinfer
import numpy as np
import pytest
import torch
from flashinfer.utils import MaskMode, TensorLayout

from graphengine.attention.base import AttentionBatch, AttentionShape, HostRows
from graphengine.attention.flashinfer import FlashInferAttention, FlashInferSizes
from graphengine.attention.reference import ReferenceAttention

Tensor = torch.Tensor

NUM_SMS = 132  # of the device that the double plays
BLOCK = 4
SHAPE = AttentionShape(
    num_heads=6, num_kv_heads=2, head_dim=64, block_size=BLOCK, sliding_window=None
)
SIZES = FlashInferSizes(
    cells=frozenset((num_reqs, rows) for num_reqs in (1, 2, 4, 8) for rows in (1, 2, 4)),
    max_num_reqs=8,
    max_num_rows=64,
    max_blocks=8,
)


def planner_parameters() -> list[str]:
    """Names of the planner's parameters, in order, as the installed C++ source has them."""
    source = Path(flashinfer.__file__).parent / "data/csrc/batch_prefill.cu"
    found = re.search(r"BatchPrefillWithKVCachePlan\((.*?)\)", source.read_text(), re.DOTALL)
    assert found, "the planner is not where it was"
    return [parameter.split("=")[0].split()[-1] for parameter in found[1].split(",")]


@dataclass
class NativeDouble:
    """See the module docstring."""

    modules: list[tuple[Any, ...]] = field(default_factory=list)
    plans: list[dict[str, Any]] = field(default_factory=list)
    before_plan: Callable[[], None] = lambda: None
    # what the planner is made to answer in place of the truth, by place
    planted: dict[int, int] = field(default_factory=dict)

    def get(self, backend: str, *args: Any) -> SimpleNamespace:
        """`flashinfer.prefill.get_batch_prefill_module`."""
        self.modules.append((backend, *args))
        return SimpleNamespace(plan=self.plan, paged_run=self.paged_run)

    def plan(self, *args: Any) -> list[int]:
        """The C++ planner: what it answers hangs on these arguments alone, with split-KV off."""
        self.before_plan()
        names = planner_parameters()
        assert len(args) == len(names)
        call = {
            name: arg.clone() if isinstance(arg, Tensor) and arg.dtype == torch.int32 else arg
            for name, arg in zip(names, args, strict=True)
        }
        self.plans.append(call)
        assert call["enable_cuda_graph"], "planned freely: the launch follows the batch"
        assert call["disable_split_kv"], "split-KV: what the planner answers is not modelled"
        assert call["uniform_q_len"] == 0, "a hint changes the q tile"
        group = call["num_qo_heads"] // call["num_kv_heads"]
        rows, num_reqs = call["total_num_rows"], call["batch_size"]
        assert int(call["qo_indptr"][-1]) <= rows
        packed = (rows - num_reqs + 1) * group
        tile = 128 if packed > 64 and call["head_dim_qk"] < 256 else 64 if packed > 16 else 16
        padded = max(2 * NUM_SMS // call["num_kv_heads"], -(-rows * group // tile) + num_reqs - 1)
        info = [padded, rows, 0, tile, 0, 4 * padded, 8 * padded, 0, *[12 * padded] * 5, 1, 0]
        for place, value in self.planted.items():
            info[place] = value
        return info

    def paged_run(self, *args: Any) -> None:
        """The kernel: every argument that says what is attended, from the wrapper's buffers."""
        q, keys, values, qo_indptr, kv_indptr, indices, last_page_len, out, lse = args[3:12]
        mask_mode, layout, window_left, enable_pdl = args[12:16]
        assert (mask_mode, layout) == (MaskMode.CAUSAL.value, TensorLayout["NHD"].value)
        assert (lse, window_left, enable_pdl) == (None, -1, False)
        assert args[16] is None, "a custom mask"
        assert q.dtype == keys.dtype == out.dtype, "one dtype for all"
        assert args[23] == q.shape[2] ** -0.5, "softmax scale"
        block = keys.shape[1]
        rows, pages = qo_indptr.diff(), kv_indptr.diff()
        live = rows > 0
        assert (last_page_len[live] >= 1).all()
        assert (last_page_len <= block).all()
        lens = (pages - 1).clamp(min=0) * block + last_page_len
        starts, table = [0], torch.zeros(int(live.sum()), int(pages.max()), dtype=torch.int32)
        positions = []
        for index, request in enumerate(torch.nonzero(live)[:, 0].tolist()):
            first, end = kv_indptr[request : request + 2].tolist()
            table[index, : end - first] = indices[first:end]
            length, count = int(lens[request]), int(rows[request])
            positions.append(torch.arange(length - count, length, dtype=torch.int32))
            starts.append(starts[-1] + count)
        batch = AttentionBatch(
            table,
            torch.tensor(starts, dtype=torch.int32),
            torch.cat(positions),
            int(rows.max()),
        )
        num_heads, kv_heads, dim = q.shape[1], keys.shape[2], q.shape[2]
        qkv = torch.zeros(len(q), num_heads + 2 * kv_heads, dim, dtype=q.dtype)
        qkv[:, :num_heads] = q
        shape = AttentionShape(num_heads, kv_heads, dim, block, None)
        cache = torch.stack([keys, values], dim=1)
        flat = torch.zeros(len(q), num_heads * dim, dtype=out.dtype)
        ReferenceAttention(shape).run(flat, qkv.flatten(1), cache, batch)
        out.copy_(flat.view(out.shape))


class PlainMemory:
    """torch as the wrapper imports it, on a machine that has no memory to pin."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return torch.empty(*args, **options)


def install(monkeypatch: pytest.MonkeyPatch) -> NativeDouble:
    """Put a double below the installed package."""
    double = NativeDouble()
    monkeypatch.setattr("flashinfer.prefill.torch", PlainMemory())
    monkeypatch.setattr("flashinfer.prefill.get_batch_prefill_module", double.get)
    return double


def make_attention(dtype: torch.dtype = torch.float32, **options: Any) -> FlashInferAttention:
    device = torch.device("cpu")
    return FlashInferAttention(dtype, SHAPE, SIZES, device=device, **options)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """A batch as the engine hands it over, with its K and V in place."""

    batch: AttentionBatch
    host: HostRows
    qkv: Tensor
    cache: Tensor

    @property
    def num_rows(self) -> int:
        return len(self.batch.positions)

    def out(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((self.num_rows, SHAPE.num_heads * SHAPE.head_dim), torch.nan, dtype=dtype)

    def run(self, attention: FlashInferAttention) -> Tensor:
        out = self.out()
        attention.plan(self.batch, self.host)
        attention.run(out, self.qkv, self.cache, self.batch)
        return out

    def reference(self) -> Tensor:
        out = self.out()
        ReferenceAttention(SHAPE).run(out, self.qkv, self.cache, self.batch)
        return out


def make_rows(
    requests: list[tuple[int, int]],
    *,
    allocated: list[int] | None = None,
    width: int = SIZES.max_blocks,
    max_position: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Rows:
    """Requests of (past, own rows), every slot that a row may see filled with its own numbers.

    Args:
        allocated: blocks of each request; None: as many as its rows need. The table is 0 behind.
        max_position: positions are clipped to it, as tail rows at the context limit are.
    """
    generator = torch.Generator().manual_seed(11)
    rows = [count for _, count in requests]
    lens = [past + count for past, count in requests]
    needed = [min(-(-length // BLOCK), width) for length in lens]
    counts = needed if allocated is None else allocated
    num_blocks = sum(counts) + 1
    order = torch.randperm(num_blocks - 1, generator=generator).int() + 1
    table = torch.zeros(len(requests), width, dtype=torch.int32)
    for index, mine in enumerate(order.split(counts)):
        table[index, : len(mine)] = mine
    positions = torch.cat([torch.arange(past, past + count) for past, count in requests]).int()
    if max_position is not None:
        positions.clamp_(max=max_position)
    starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    kv_heads, dim = SHAPE.num_kv_heads, SHAPE.head_dim
    cache = torch.randn(num_blocks, 2, BLOCK, kv_heads, dim, generator=generator).to(dtype)
    width_of_row = (SHAPE.num_heads + 2 * kv_heads) * dim
    return Rows(
        batch=AttentionBatch(table, torch.from_numpy(starts), positions, max(rows)),
        host=HostRows(table.numpy(), starts, np.array(lens, dtype=np.int32)),
        qkv=torch.randn(sum(rows), width_of_row, generator=generator),
        cache=cache,
    )
