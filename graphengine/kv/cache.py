"""KV storage: the paged tensors themselves, and how many blocks fit.

Owns sizes and allocation, of the target's layers and of what a proposer keeps over the same block
table: KV of its own layers and hidden states. Who uses which block is the block pool's business.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from graphengine.config import MAX_SLOTS, CacheConfig
from graphengine.models.config import ModelConfig
from proposers.device import DraftPlan, KVShape


def block_bytes(
    model: ModelConfig, dtype: torch.dtype, block_size: int, draft: DraftPlan | None = None
) -> int:
    """Bytes of one block over all layers, K and V, and over what `draft` keeps beside them."""
    numbers = model.num_layers * 2 * model.kv_size
    if draft is not None:
        numbers += sum(2 * one.num_kv_heads * one.head_dim for one in draft.kv_layers)
        numbers += len(draft.taps) * model.hidden_size
    return numbers * block_size * dtype.itemsize


def resolve_num_blocks(
    cache: CacheConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    *,
    max_num_seqs: int,
    max_model_len: int,
    draft: DraftPlan | None = None,
) -> int:
    """Number of physical blocks, the null block included.

    Raises:
        ValueError: `max_bytes` holds fewer blocks than one full context needs. An explicit
            `num_blocks` is taken as it is; requests that cannot fit it are refused one by one.
    """
    size = block_bytes(model, dtype, cache.block_size, draft)
    per_context = -(-max_model_len // cache.block_size)
    if cache.num_blocks is not None:
        return cache.num_blocks
    affordable = cache.max_bytes // size
    if affordable < per_context + 1:
        raise ValueError(
            f"CacheConfig.max_bytes={cache.max_bytes} holds {affordable} blocks of {size} "
            "bytes; one context of "
            f"max_model_len={max_model_len} needs {per_context + 1}: raise max_bytes to "
            f"{(per_context + 1) * size} or "
            f"lower max_model_len"
        )
    return min(affordable, max_num_seqs * per_context + 1, MAX_SLOTS // cache.block_size)


def model_layers(model: ModelConfig) -> list[KVShape]:
    """What each layer of a model keeps."""
    shape = KVShape(num_kv_heads=model.num_kv_heads, head_dim=model.head_dim)
    return [shape] * model.num_layers


def allocate(
    layers: Sequence[KVShape],
    dtype: torch.dtype,
    *,
    num_blocks: int,
    block_size: int,
    device: torch.device,
) -> list[torch.Tensor]:
    """One zeroed `[num_blocks, 2, block_size, num_kv_heads, head_dim]` a layer.

    Raises:
        ValueError: the memory cannot be had.
    """
    shapes = [(num_blocks, 2, block_size, one.num_kv_heads, one.head_dim) for one in layers]
    try:
        return [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
    except RuntimeError as error:  # torch has no class of its own for this
        size = sum(math.prod(shape) for shape in shapes) * dtype.itemsize
        raise ValueError(
            f"a KV cache of num_blocks={num_blocks} ({size} bytes) cannot be allocated; lower "
            "CacheConfig.num_blocks or max_bytes"
        ) from error
