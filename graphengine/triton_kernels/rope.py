"""Rotation of queries and keys, their optional norm, and the KV write, in one kernel.

A program has one head of one row (Su et al. 2021, eq. 34, halves paired as the checkpoints have
them); it reads nothing of other rows or heads, and its sums are those of one block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.models.layers import Rope
from graphengine.triton_kernels.chunks import check_contiguous
from graphengine.triton_kernels.rows import check_summed, inverse_rms
from graphengine.triton_kernels.specs import KernelSpec

Tensor = torch.Tensor

# One warp: with more, several would load a number that one of them replaces. No fusion: products
# and sums are rounded one by one, as on CPU.
_OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}


def rope_write(
    qkv: Tensor,
    kv_cache: Tensor,
    tables: tuple[Tensor, Tensor],
    rows: tuple[Tensor, Tensor],
    norms: tuple[Tensor | None, Tensor | None],
    *,
    rope: Rope,
    eps: float,
) -> None:
    """See `models/layers.py`. Rows whose slot is in the null block are not stored.

    Args:
        tables: cosines and sines [max_model_len, dim // 2].
        rows: positions and slot_mapping [T] int32.
        norms: weights [dim] of q and of k, or None twice.
    """
    check_summed(qkv, kv_cache, *tables, *(norm for norm in norms if norm is not None))
    check_contiguous(*rows)
    num_heads = rope.num_heads + 2 * rope.num_kv_heads
    half = rope.head_dim // 2
    _rope_write[(len(qkv), num_heads)](
        qkv,
        kv_cache,
        *tables,
        *rows,
        *norms,
        NUM_HEADS=rope.num_heads,
        NUM_KV_HEADS=rope.num_kv_heads,
        HALF=half,
        BLOCK=triton.next_power_of_2(half),
        BLOCK_SIZE=rope.block_size,
        HAS_NORM=norms[0] is not None,
        EPS=eps,
        **_OPTIONS,
    )


@triton.jit
def _rope_write(
    qkv,
    kv_cache,
    cosines,
    sines,
    positions,
    slot_mapping,
    q_norm,
    k_norm,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EPS: tl.constexpr,
):
    t, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim: tl.constexpr = 2 * HALF
    lanes = tl.arange(0, BLOCK)
    mask = lanes < HALF
    at = qkv + (t * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * dim + lanes
    first = tl.load(at, mask=mask, other=0.0)
    second = tl.load(at + HALF, mask=mask, other=0.0)
    if head < NUM_HEADS + NUM_KV_HEADS:
        if HAS_NORM:
            scale = inverse_rms(tl.sum(first * first + second * second), dim, EPS)
            weight = q_norm if head < NUM_HEADS else k_norm
            first = first * scale * tl.load(weight + lanes, mask=mask, other=0.0)
            second = second * scale * tl.load(weight + HALF + lanes, mask=mask, other=0.0)
        angle = tl.load(positions + t).to(tl.int64) * HALF + lanes
        cosine = tl.load(cosines + angle, mask=mask, other=0.0)
        sine = tl.load(sines + angle, mask=mask, other=0.0)
        turned = first * cosine - second * sine
        second = second * cosine + first * sine
        first = turned
        tl.store(at, first, mask=mask)
        tl.store(at + HALF, second, mask=mask)
    slot = tl.load(slot_mapping + t).to(tl.int64)
    if head >= NUM_HEADS and slot >= BLOCK_SIZE:
        part = (head - NUM_HEADS) // NUM_KV_HEADS  # 0: keys, 1: values
        kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
        line = (slot // BLOCK_SIZE * 2 + part) * BLOCK_SIZE + slot % BLOCK_SIZE
        to = kv_cache + (line * NUM_KV_HEADS + kv_head) * dim + lanes
        tl.store(to, first.to(kv_cache.dtype.element_ty), mask=mask)
        tl.store(to + HALF, second.to(kv_cache.dtype.element_ty), mask=mask)


def _spec(name: str, heads: tuple[int, int, int], element: str, *, norm: bool) -> KernelSpec:
    num_heads, num_kv_heads, dim = heads
    tensors = {"qkv": "*fp32", "kv_cache": element, "cosines": "*fp32", "sines": "*fp32"}
    tensors |= {"positions": "*i32", "slot_mapping": "*i32"}
    weights = dict.fromkeys(("q_norm", "k_norm"), "*fp32" if norm else None)
    constants: dict[str, object] = {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HALF": dim // 2,
        "BLOCK": triton.next_power_of_2(dim // 2),
        "BLOCK_SIZE": 16,
        "HAS_NORM": norm,
        "EPS": 1e-6,
    }
    if norm:
        tensors |= {key: value for key, value in weights.items() if value is not None}
    else:
        constants |= weights
    return KernelSpec(name, _rope_write, tensors, constants, _OPTIONS)


COMPILED: tuple[KernelSpec, ...] = (
    _spec("rope and write 9/3x64 bf16", (9, 3, 64), "*bf16", norm=False),
    _spec("rope and write 32/8x128 normed bf16", (32, 8, 128), "*bf16", norm=True),
    _spec("rope and write 32/8x80 fp32", (32, 8, 80), "*fp32", norm=False),
    _spec("rope and write 32/8x80 normed fp32", (32, 8, 80), "*fp32", norm=True),
)
