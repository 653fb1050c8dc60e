"""The memory plan: every byte that an engine holds while it serves, known before weights are read.

Owns the sum and its comparison with the machine: the system would grant more, and end the process
when it is touched. What Python and torch take for themselves is not in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from graphengine.attention.cpu import SCRATCH_FLOATS
from graphengine.captured_step import make_buffers
from graphengine.device_rows import DeviceRows
from graphengine.kv.cache import block_bytes
from graphengine.models.decoder import DecoderWeights
from graphengine.opset import GPU_SCRATCH_FLOATS
from graphengine.prompt_logprobs import PromptLogprobs
from graphengine.request_state import RequestState
from graphengine.resolve import ResolvedConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Bytes by part."""

    weights: int  # the draft's included, as in all of these
    buffers: int  # static buffers, which all cells share
    # partial sums (of attention; on a GPU of products, too), rotation tables, rows of requests,
    # logits of prompts
    scratch: int
    kv: int

    @property
    def total(self) -> int:
        return self.weights + self.buffers + self.scratch + self.kv

    def check(self, available: int) -> None:
        """Raises ValueError, naming the parts, where they are more than `available` bytes."""
        if self.total > available:
            raise ValueError(
                f"{self.total} bytes cannot be allocated, the machine has {available}: weights "
                f"{self.weights}, static buffers {self.buffers}, scratch {self.scratch}, KV cache "
                f"{self.kv}; lower CacheConfig.num_blocks or max_bytes, max_num_seqs, "
                "max_draft_tokens or max_model_len"
            )


def plan_memory(resolved: ResolvedConfig) -> MemoryPlan:
    """The plan of an engine; allocates nothing."""
    model, sizes, meta = resolved.model, resolved.sizes, torch.device("meta")
    draft = resolved.draft
    layers = draft.kv_layers[:1] if draft is not None else ()  # whose table all of them share
    head_dims = model.head_dim + sum(layer.head_dim for layer in layers)
    rotation = sizes.max_model_len * head_dims * 4
    rows = RequestState.row_bytes(sizes.max_model_len, sizes.block_size) * sizes.max_num_seqs
    row = DeviceRows.row_bytes(sizes.max_model_len, model.vocab_size)
    rows += row * (sizes.max_num_seqs + 1)
    partials = SCRATCH_FLOATS if resolved.device.type == "cpu" else GPU_SCRATCH_FLOATS
    weights = DecoderWeights.allocate(model, resolved.dtype, meta).num_bytes
    return MemoryPlan(
        weights=weights + (draft.num_weight_bytes if draft is not None else 0),
        buffers=make_buffers(model, sizes, meta, draft).num_bytes,
        scratch=partials * 4 + rotation + rows + PromptLogprobs.num_bytes(model.vocab_size),
        kv=resolved.num_blocks * block_bytes(model, resolved.dtype, sizes.block_size, draft),
    )


def available_bytes(device: torch.device) -> int:
    """Free memory of a CUDA device.

    On CPU the machine's memory, or the limit of a control group around this process if that is
    less.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in group_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")):
        with suppress(OSError, ValueError):  # not there, or "max"
            available = min(available, int(path.read_text(encoding="utf-8")))
    return available


def group_limits(groups: Path, root: Path) -> Iterator[Path]:
    """Files that may hold a memory limit: of the process's groups and of those around them."""
    with suppress(OSError):
        for line in groups.read_text(encoding="utf-8").splitlines():
            _, controllers, group = line.split(":", 2)
            names = group.strip("/").split("/")
            for end in range(len(names) + 1):
                if not controllers:  # version 2
                    yield root.joinpath(*names[:end], "memory.max")
                elif "memory" in controllers.split(","):
                    yield root.joinpath("memory", *names[:end], "memory.limit_in_bytes")
