"""Layer operations on the device: values of the CPU's, bits of a row that nothing else moves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from graphengine.models.layers import LayerOps, Rope
from graphengine.models.torch_ops import argmax, embed, norm_heads, rms_norm, rotate, write_kv
from tests.gpu.device import PLACES, TOLERANCE, distance

pytest.importorskip("triton")
opset = pytest.importorskip("graphengine.triton_opset")

EPS = 1e-5
ROWS = {"cpu": (1, 3, 17), "cuda": (1, 2, 7, 8, 16, 17, 33, 64, 128, 200)}
# (n, k) of products: SmolLM2's and an 8B model's on a GPU, odd and tiny ones where interpreted.
SHAPES = {
    "cpu": [(33, 72)],
    "cuda": [(960, 576), (576, 1536), (49152, 576), (6144, 4096), (4096, 14336), (333, 1000)],
}


def layer_ops(device: str, dtype: torch.dtype, n: int, k: int, rows: int) -> LayerOps:
    made = opset.TritonOpSet(
        dtype, torch.device(device), max_rows=rows, shapes=[(n, k)], vocab_size=n
    )
    ops: LayerOps = made.layer_ops(EPS)
    return ops


def random(device: str, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device)


def nan(device: str, *shape: int) -> Tensor:
    return torch.full(shape, float("nan"), device=device)


def check_rows(compute: Callable[[int, int], Tensor], device: str, rows: int) -> Tensor:
    """All rows at once, which any part of them must repeat bit for bit."""
    whole = compute(0, rows)
    for count in ROWS[device]:
        for first in {0, (rows - count) // 2, rows - count}:
            part = compute(first, first + count)
            assert torch.equal(part, whole[first : first + count]), f"{count} rows from {first}"
    return whole


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_products(device: str, dtype: torch.dtype) -> None:
    """A tile that sums in another order when a call has more rows, or a wrong edge of a split."""
    rows = max(ROWS[device])
    for n, k in SHAPES[device]:
        ops = layer_ops(device, dtype, n, k, rows)
        x, weight = random(device, rows, k), random(device, n, k, seed=1).to(dtype) / k**0.5
        residual = random(device, rows, n, seed=2)

        def linear(
            first: int,
            last: int,
            ops: LayerOps = ops,
            x: Tensor = x,
            weight: Tensor = weight,
            residual: Tensor = residual,
        ) -> Tensor:
            out = residual[first:last].clone()
            ops.linear(out, x[first:last].contiguous(), weight, add=True)
            return out

        expected = x.to(dtype).double() @ weight.double().T + residual.double()
        assert distance(check_rows(linear, device, rows), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_gate_and_up(device: str, dtype: torch.dtype) -> None:
    rows = max(ROWS[device])
    for i, k in [(20, 72)] if device == "cpu" else [(1536, 576), (14336, 4096)]:
        ops = layer_ops(device, dtype, 2 * i, k, rows)
        x, weight = random(device, rows, k), random(device, 2 * i, k, seed=1).to(dtype) / k**0.5

        def gated(
            first: int,
            last: int,
            ops: LayerOps = ops,
            x: Tensor = x,
            weight: Tensor = weight,
            i: int = i,
        ) -> Tensor:
            out = nan(device, last - first, i)
            ops.gate_up(out, x[first:last].contiguous(), weight)
            return out

        gate, up = (x.to(dtype).double() @ weight.double().T).chunk(2, dim=1)
        expected = torch.nn.functional.silu(gate) * up
        assert distance(check_rows(gated, device, rows), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_embedding_norm_and_argmax(device: str, dtype: torch.dtype) -> None:
    rows, vocab, width = max(ROWS[device]), 264 if device == "cpu" else 151_936, 72
    ops = layer_ops(device, dtype, vocab, width, rows)
    table, x = random(device, vocab, width).to(dtype), random(device, rows, width, seed=1)
    weight = 1 + random(device, width, seed=2) / 5
    logits = random(device, rows, vocab, seed=3)
    logits[0, [5, 200]], logits[1, 7], logits[2] = 99.0, float("nan"), float("nan")
    ids = (torch.arange(rows, dtype=torch.int32, device=device) * 7919) % vocab

    def embedded(first: int, last: int) -> Tensor:
        out = nan(device, last - first, width)
        ops.embed(out, table, ids[first:last].contiguous())
        return out

    def normed(first: int, last: int) -> Tensor:
        out = nan(device, last - first, width)
        ops.rms_norm(out, x[first:last].contiguous(), weight)
        return out

    def chosen(first: int, last: int) -> Tensor:
        out = torch.full((last - first,), -1, dtype=torch.int32, device=device)
        ops.argmax(out, logits[first:last].contiguous())
        return out

    twin = torch.empty(rows, width)
    embed(twin, table.cpu(), ids.cpu())
    assert torch.equal(check_rows(embedded, device, rows).cpu(), twin)
    rms_norm(twin, x.cpu(), weight.cpu(), torch.tensor([EPS]))
    assert distance(check_rows(normed, device, rows), twin) < 1e-6
    best = torch.empty(rows, dtype=torch.int32)
    argmax(best, logits.cpu())
    assert best[[0, 2]].tolist() == [5, 0]
    assert torch.equal(check_rows(chosen, device, rows).cpu(), best)


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_rotation_and_cache(device: str, dtype: torch.dtype, with_norms: bool) -> None:
    """K and V of every row in its slot, rotated by its own position, and in no other slot."""
    rows, heads, kv_heads, dim, block = max(ROWS[device]), 4, 2, 32, 16
    ops = layer_ops(device, dtype, 72, 72, rows)
    angles = random("cpu", 300, dim // 2)
    rope = Rope(
        cos=angles.cos().to(device),
        sin=angles.sin().to(device),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        block_size=block,
    )
    qkv = random(device, rows, (heads + 2 * kv_heads) * dim)
    norms = (1 + random(device, dim) / 5, 1 + random(device, dim, seed=4) / 5)
    positions = (torch.arange(rows, dtype=torch.int32, device=device) * 5) % 300
    slots = block + torch.randperm(rows + 20)[:rows].int().to(device)
    shape = (2 + (rows + 20) // block, 2, block, kv_heads, dim)
    cache = torch.full(shape, 7.0, dtype=dtype, device=device)

    def rotated(first: int, last: int) -> Tensor:
        part = qkv[first:last].clone()
        at = (positions[first:last].contiguous(), slots[first:last].contiguous())
        ops.rope_write(part, cache, rope, *at, norms if with_norms else None)
        return part

    out = check_rows(rotated, device, rows)
    twin, twin_cache = qkv.cpu().clone(), torch.full(shape, 7.0, dtype=dtype)
    per_head = twin.view(rows, -1, dim)
    if with_norms:
        norm_heads(per_head, *(one.cpu() for one in norms), kv_heads, torch.tensor([EPS]))
    rotate(per_head, rope.cos.cpu(), rope.sin.cpu(), positions.cpu().long(), kv_heads)
    write_kv(twin_cache, per_head, slots.cpu().long(), kv_heads)
    assert distance(out, twin) < 1e-5
    assert distance(cache, twin_cache) < TOLERANCE[dtype]
    written = torch.zeros(shape[0] * block, dtype=torch.bool)
    written[slots.cpu().long()] = True
    assert (cache.cpu().transpose(1, 2).reshape(len(written), -1)[~written] == 7).all()
