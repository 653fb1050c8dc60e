"""Static buffers of a chain of drafts, beside the target's, and the names that it shares with it.

Every name of its own starts with `draft.`. Who writes them is their role: the host (`input`) or the
captured chain.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from capture.buffers import BufferSpec
from proposers.device import DRAFT_TIER, Architecture
from proposers.requests import WORDS

TIER: Final = DRAFT_TIER

# The target's own inputs, which a chain writes for itself before the target does.
INPUTS: Final = ("token_ids", "positions", "slot_mapping", "block_table", "query_start_loc")
# What the host tells a chain; the rest of its inputs the chain makes of it.
TOLD: Final = (
    "state_rows",
    "allowed_drafts",
    "block_table",
    "query_start_loc",
    "draft.filled",
    "draft.requests",
    "draft.loop_start",
)


def chain_buffers(
    architecture: Architecture, *, vocab_size: int, target_vocab: int, draft_sampling: str
) -> list[BufferSpec]:
    """What every chain needs beside the target's buffers.

    Args:
        architecture: of the draft's layers.
        vocab_size: columns of its logits.
        target_vocab: columns of the distributions that it hands over.
    """
    q_size = architecture.num_heads * architecture.head_dim
    kv_size = architecture.num_kv_heads * architecture.head_dim
    hidden = architecture.hidden_size
    drawn = [
        BufferSpec(
            name="draft.probs",
            shape=("T", target_vocab),
            dtype=torch.float32,
            role="output",
            cells_only=True,
        )
    ]
    return [
        scratch("hidden", hidden),
        scratch("normed", hidden),
        scratch("qkv", q_size + 2 * kv_size),
        scratch("attended", q_size),
        scratch("activated", architecture.intermediate_size),
        _by_request("state", (hidden,), torch.float32, "scratch"),
        _by_request("logits", (vocab_size,), torch.float32, "scratch"),
        _by_request("chosen", (), torch.int32, "scratch"),
        _by_request("filled", (), torch.int32, "input"),
        _by_request("last_rows", (), torch.int32, "scratch"),
        _by_request("requests", (WORDS,), torch.int32, "input"),
        BufferSpec(name="draft.loop_start", shape=("R+1",), dtype=torch.int32, role="input"),
        _by_cell("loop_positions", "scratch"),
        _by_cell("loop_slots", "scratch"),
        _by_cell("drafts", "output"),
        *(drawn if draft_sampling == "probabilistic" else ()),
    ]


def scratch(name: str, width: int) -> BufferSpec:
    """An activation `draft.NAME` [T, width] fp32."""
    return BufferSpec(name=f"draft.{name}", shape=("T", width), dtype=torch.float32, role="scratch")


def _by_request(name: str, shape: tuple[int, ...], dtype: torch.dtype, role: Any) -> BufferSpec:
    return BufferSpec(
        name=f"draft.{name}", shape=("R", *shape), dtype=dtype, role=role, cells_only=True
    )


def _by_cell(name: str, role: Any) -> BufferSpec:
    """[T] int32: one number for each request and column of a cell."""
    return BufferSpec(
        name=f"draft.{name}", shape=("T",), dtype=torch.int32, role=role, cells_only=True
    )
