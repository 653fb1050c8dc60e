"""Attention alone: what FlashInfer's plan costs the host, and what not splitting the keys costs."""

from __future__ import annotations

import itertools
import time
from statistics import median

import torch

from graphengine.attention.base import AttentionBackend, AttentionBatch, AttentionShape, HostRows
from graphengine.attention.flashinfer import FlashInferAttention, FlashInferSizes
from graphengine.attention.triton import TritonAttention
from profiles.gpu_stages.base import Clock, Context, Stage

SHAPE = AttentionShape(32, 8, 128, 16, None)  # of an 8B model
CONTEXTS = (1024, 8192, 32768)
NUM_CALLS = 20  # in one graph, so that launches do not count
PLANS = 200


def batch_of(
    num_reqs: int, query_len: int, kv_len: int, device: torch.device
) -> tuple[AttentionBatch, HostRows]:
    """Requests of one length, each with blocks of its own."""
    blocks = -(-kv_len // SHAPE.block_size)
    table = torch.arange(1, num_reqs * blocks + 1, dtype=torch.int32).view(num_reqs, blocks)
    starts = torch.arange(num_reqs + 1, dtype=torch.int32) * query_len
    positions = torch.arange(kv_len - query_len, kv_len, dtype=torch.int32).repeat(num_reqs)
    lens = torch.full((num_reqs,), kv_len, dtype=torch.int32)
    batch = AttentionBatch(table.to(device), starts.to(device), positions.to(device), query_len)
    return batch, HostRows(table.numpy(), starts.numpy(), lens.numpy())


def flashinfer(
    num_reqs: int, query_len: int, kv_len: int, device: torch.device
) -> AttentionBackend:
    """The backend with the invariant recipe. ValueError where FlashInfer is missing."""
    sizes = FlashInferSizes(
        cells=frozenset({(num_reqs, query_len)}),
        max_num_reqs=num_reqs,
        max_num_rows=num_reqs * query_len,
        max_blocks=-(-kv_len // SHAPE.block_size),
    )
    return FlashInferAttention(torch.bfloat16, SHAPE, sizes, device=device)


def call_seconds(backend: AttentionBackend, num_reqs: int, query_len: int, kv_len: int) -> float:
    """Device seconds of one call, by graphs of many, over a cache that no device cache holds."""
    device = torch.device("cuda")
    batch, host = batch_of(num_reqs, query_len, kv_len, device)
    num_blocks = int(batch.block_table.max()) + 1
    sizes = (num_blocks, 2, SHAPE.block_size, SHAPE.num_kv_heads, SHAPE.head_dim)
    caches = [
        torch.randn(sizes, device=device, dtype=torch.bfloat16)
        for _ in range(max(1, min(8, (1 << 29) // (num_blocks << 16))))
    ]
    width = (SHAPE.num_heads + 2 * SHAPE.num_kv_heads) * SHAPE.head_dim
    qkv = torch.randn(num_reqs * query_len, width, device=device)
    out = torch.empty(len(qkv), SHAPE.num_heads * SHAPE.head_dim, device=device)
    backend.plan(batch, host)

    def calls() -> None:
        for call in range(NUM_CALLS):
            backend.run(out, qkv, caches[call % len(caches)], batch)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    return Clock(device).seconds(graph.replay) / NUM_CALLS


def split_price(context: Context) -> None:
    """A layer's attention by both backends, over context, rows and batch size."""
    context.keep(shape="32 heads, 8 KV heads of 128, blocks of 16, bfloat16")
    device = context.torch_device
    for num_reqs, query_len, kv_len in itertools.product((1, 8), (1, 6), CONTEXTS):
        key = f"{num_reqs} x {query_len} at {kv_len}"
        sizes = (num_reqs, query_len, kv_len)
        row = {"triton": call_seconds(TritonAttention(SHAPE, device), *sizes)}
        context.row(key, row)  # FlashInfer may be missing
        row["flashinfer"] = call_seconds(flashinfer(*sizes, device), *sizes)
        row["flashinfer_over_triton"] = row["flashinfer"] / row["triton"]
        row["kv_bytes"] = num_reqs * kv_len * 2 * SHAPE.num_kv_heads * SHAPE.head_dim * 2
        context.row(key, row)


def plan(context: Context) -> None:
    """Host microseconds of a plan, and of the wait for the one before it, by cell."""
    device = context.torch_device
    for num_reqs, query_len, kv_len in itertools.product((1, 8, 64), (1, 6), CONTEXTS[:2]):
        backend = flashinfer(num_reqs, query_len, kv_len, device)
        batch, host = batch_of(num_reqs, query_len, kv_len, device)
        seconds = []
        for _ in range(PLANS):
            start = time.perf_counter()
            backend.plan(batch, host)
            seconds.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        row = {"us": 1e6 * median(seconds[5:]), "worst_us": 1e6 * max(seconds[5:])}
        context.row(f"{num_reqs} x {query_len} at {kv_len}", row)


STAGES = (
    Stage(name="plan", about="host microseconds of FlashInfer's plan", seconds=40, run=plan),
    Stage(
        name="split-price", about="FlashInfer without split against Triton", seconds=60,
        run=split_price,
    ),
)  # fmt: skip
