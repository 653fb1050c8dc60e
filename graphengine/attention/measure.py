"""How long a backend's attention takes: a layer of a few of the table's cells, plan included.

Owns the batches and the clock. The plan of a step serves all of its layers, so a layer carries its
share of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch

from graphengine.attention.base import AttentionBackend, AttentionBatch, AttentionShape, HostRows

Tensor = torch.Tensor

CONTEXTS = (256, 2048)  # tokens before the step's own
NUM_TURNS = 15


def layer_seconds(
    backend: AttentionBackend,
    shape: AttentionShape,
    cells: Sequence[tuple[int, int]],
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    num_layers: int,
) -> float:
    """Seconds of one layer, the mean over cells and contexts of each one's median turn.

    Args:
        cells: (num_reqs, query_len).
    """
    found = []
    for num_reqs, query_len in cells:
        for context in sorted({min(one, max_model_len - query_len) for one in CONTEXTS}):
            batch, host = _batch(shape, num_reqs, query_len, context, max_model_len, device)
            cache = _cache(shape, batch, dtype)
            width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
            qkv = torch.ones(num_reqs * query_len, width, device=device)
            out = torch.empty(len(qkv), shape.num_heads * shape.head_dim, device=device)
            turns = []
            backend.plan(batch, host)
            run = partial(backend.run, out, qkv, cache, batch)
            layers = _replayable(partial(_repeat, run, num_layers), device)
            for _ in range(NUM_TURNS):
                _wait(device)
                start = time.perf_counter()
                backend.plan(batch, host)
                layers()
                _wait(device)
                turns.append(time.perf_counter() - start)
            found.append(median(turns[1:]) / num_layers)
    return sum(found) / len(found)


def _batch(
    shape: AttentionShape,
    num_reqs: int,
    query_len: int,
    context: int,
    max_model_len: int,
    device: torch.device,
) -> tuple[AttentionBatch, HostRows]:
    """Requests of one length, each in blocks of its own."""
    size, length = shape.block_size, context + query_len
    blocks = -(-length // size)
    table = torch.zeros(num_reqs, -(-max_model_len // size), dtype=torch.int32)
    table[:, :blocks] = torch.arange(1, num_reqs * blocks + 1).view(num_reqs, blocks)
    starts = torch.arange(num_reqs + 1, dtype=torch.int32) * query_len
    positions = torch.arange(context, length, dtype=torch.int32).repeat(num_reqs)
    lens = torch.full((num_reqs,), length, dtype=torch.int32)
    on_device = (table.to(device), starts.to(device), positions.to(device))
    host = HostRows(table.numpy(), starts.numpy(), lens.numpy())
    return AttentionBatch(*on_device, query_len), host


def _cache(shape: AttentionShape, batch: AttentionBatch, dtype: torch.dtype) -> Tensor:
    num_blocks = int(batch.block_table.max()) + 1
    sizes = (num_blocks, 2, shape.block_size, shape.num_kv_heads, shape.head_dim)
    return torch.ones(sizes, dtype=dtype, device=batch.positions.device)


def _repeat(run: Callable[[], None], count: int) -> None:
    for _ in range(count):
        run()


def _replayable(layers: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The same as an engine would run it: on a GPU, as a graph."""
    if device.type != "cuda":
        return layers
    layers()  # compiles
    _wait(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    return partial(graph.replay)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
