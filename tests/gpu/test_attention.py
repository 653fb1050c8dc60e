"""Both attention backends on the device: the reference's values, and bits that no batch moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from graphengine.attention.base import AttentionBackend, AttentionBatch, AttentionShape, plan
from graphengine.attention.reference import ReferenceAttention
from tests.gpu.device import PLACES, TOLERANCE, distance, gpu
from tests.graphengine.kernels.calls import Context

pytest.importorskip("triton")
from graphengine.attention.flashinfer import (
    FlashInferAttention,
    FlashInferSizes,
    check_supported,
)
from graphengine.attention.triton import TritonAttention
from tests.graphengine.triton_kernels.test_attention import make_context, rows_of

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in divide")

# (context, last rows of it that are queries): what decodes, verifies and prefills in one call.
REQUESTS = {
    "cpu": [(70, 3), (17, 1)],
    "cuda": [(1, 1), (257, 7), (1030, 1), (4100, 6), (40, 40), (513, 2), (2048, 64), (16, 3)],
}
HEADS = {"cpu": (3, 1, 16), "cuda": (9, 3, 64)}
# 2 MiB of scratch hold no partials of these batches, 256 MiB hold all: the two schedules.
WALK, SPLIT = 0, {"cpu": 1 << 20, "cuda": 64 << 20}
Attend = Callable[[Context], Tensor]


def moved(context: Context, device: str) -> Context:
    """The same context on a device."""
    tensors = {one.name: getattr(context, one.name) for one in fields(context)}
    return replace(
        context, **{k: v.to(device) for k, v in tensors.items() if isinstance(v, Tensor)}
    )


def shape_of(context: Context) -> AttentionShape:
    num_heads, kv_heads, head_dim, block_size = context.shape
    return AttentionShape(num_heads, kv_heads, head_dim, block_size, None)


def attend(context: Context, backend: AttentionBackend, max_query_len: int | None = None) -> Tensor:
    starts = context.query_start_loc
    longest = max_query_len or int(starts.diff().max())
    batch = AttentionBatch(context.block_table, starts, context.positions, longest)
    plan(backend, batch)
    shape = context.shape
    out = torch.full((len(context.positions), shape[0] * shape[2]), float("nan"))
    out = out.to(context.qkv.device)
    backend.run(out, context.qkv, context.cache, batch)
    return out


def by_triton(context: Context, scratch: int) -> Attend:
    device = context.qkv.device
    floats = torch.full((scratch,), float("nan"), device=device)
    backend = TritonAttention(shape_of(context), device, floats)
    return lambda one: attend(one, backend)


def by_flashinfer(context: Context) -> Attend:
    """Batches of one query length run in a cell's wrapper, all others in the shared one."""
    pytest.importorskip("flashinfer")
    lengths = {(1, q) for q in range(1, 65)} | {(len(REQUESTS["cuda"]), q) for q in (1, 7)}
    sizes = FlashInferSizes(
        cells=frozenset(lengths),
        max_num_reqs=16,
        max_num_rows=256,
        max_blocks=context.block_table.shape[1],
    )
    device = context.qkv.device
    check_supported(context.cache.dtype, shape_of(context), device)
    backend = FlashInferAttention(context.cache.dtype, shape_of(context), sizes, device=device)
    return lambda one: attend(one, backend)


def make(device: str, dtype: torch.dtype, *, poison: float = float("nan")) -> Context:
    context = make_context(REQUESTS[device], HEADS[device], dtype=dtype, poison=poison)
    return moved(context, device)


def check_rows(context: Context, run: Attend) -> None:
    """Rows alone, in pairs and in chunks of their request are those of the whole batch."""
    out = run(context)
    assert out.isfinite().all()
    starts = context.query_start_loc.tolist()
    for request, (first, last) in enumerate(pairwise(starts)):
        rows = last - first
        for low, high in {
            (0, 1),
            (rows - 1, rows),
            (0, rows),
            (rows // 2, rows),
            (0, 1 + rows // 2),
        }:
            part = run(moved(rows_of(context, request, low, high), str(out.device)))
            assert torch.equal(part, out[first + low : first + high]), (request, low, high)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_values_and_schedules(device: str, dtype: torch.dtype) -> None:
    """Who computes a chunk of keys, one program or many, changes no bit; values are right."""
    context = make(device, dtype)
    expected = attend(moved(context, "cpu"), ReferenceAttention(shape_of(context)))
    walk = by_triton(context, WALK)(context)
    assert distance(walk, expected) < TOLERANCE[dtype]
    assert torch.equal(by_triton(context, SPLIT[device])(context), walk)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_rows_do_not_depend_on_the_batch(device: str, dtype: torch.dtype) -> None:
    """q = 1 against q = k + 1, batch mates, and chunks of a prompt."""
    context = make(device, dtype)
    for scratch in (WALK, SPLIT[device]):
        check_rows(context, by_triton(context, scratch))


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flashinfer(dtype: torch.dtype) -> None:
    """Its plans with the invariant recipe: a wrapper for a cell and the shared one, in graph mode.

    Slots that a request does not own are finite here: its kernels multiply them by zero.
    """
    context = make("cuda", dtype, poison=1.0)
    run = by_flashinfer(context)
    expected = attend(moved(context, "cpu"), ReferenceAttention(shape_of(context)))
    assert distance(run(context), expected) < TOLERANCE[torch.bfloat16]
    check_rows(context, run)


@gpu
@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_a_verify_block_is_its_plain_steps(name: str) -> None:
    """`torch.equal` of q = 1 and q = k + 1 over batch sizes and k, as cells have them."""
    for num_reqs in (1, 4, 8):
        lengths = [(100 + 391 * index, 8) for index in range(num_reqs)]
        context = moved(
            make_context(lengths, HEADS["cuda"], dtype=torch.bfloat16, poison=1.0), "cuda"
        )
        run = by_triton(context, SPLIT["cuda"]) if name == "triton" else by_flashinfer(context)
        whole = run(context).view(num_reqs, 8, -1)
        for query_len in range(1, 8):
            # The first rows of each request, all requests in one call.
            keep = torch.cat([torch.arange(query_len) + 8 * r for r in range(num_reqs)]).cuda()
            starts = torch.arange(num_reqs + 1, dtype=torch.int32, device="cuda") * query_len
            part = replace(
                context,
                qkv=context.qkv[keep].contiguous(),
                positions=context.positions[keep].contiguous(),
                query_start_loc=starts,
            )
            found = run(part).view(num_reqs, query_len, -1)
            assert torch.equal(found, whole[:, :query_len]), (num_reqs, query_len)
