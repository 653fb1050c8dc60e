"""OpSet: every op that a step is made of, for one kind of device.

The one interface behind which kernels are chosen, for the target and for drafts alike. Knows no
kernel: `native_opset.py` has those of the CPU, `triton_opset.py` those of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Protocol

import torch

from graphengine.attention.base import AttentionBackend, AttentionShape
from graphengine.device_rows import DeviceRows
from graphengine.models.hidden_states import HiddenStates, StoreSlots
from graphengine.models.layers import LayerOps
from graphengine.sampling.state import SamplerState
from graphengine.sampling.verifier import GreedyVerify
from proposers.base import DraftSampling
from proposers.device import DraftOps

# Most partial sums of attention, and of matrix products, that the ops of a GPU keep room for; what
# needs more is computed in parts, with the same bits.
GPU_ATTENTION_FLOATS: Final = 32 << 20
GPU_PRODUCT_FLOATS: Final = 32 << 20
GPU_SCRATCH_FLOATS: Final = GPU_ATTENTION_FLOATS + GPU_PRODUCT_FLOATS

# Reads and writes a cell's views; captured.
CellOp = Callable[[Mapping[str, torch.Tensor]], None]


class RowOps(Protocol):
    """The step's first and last op, over the rows of requests; see `kernels/rows.cpp`."""

    def prepare(self, views: Mapping[str, torch.Tensor]) -> None:
        """Write a cell's tokens, positions, slots, drafts and room; captured, may be repeated."""

    def commit(self, views: Mapping[str, torch.Tensor]) -> None:
        """Append what a cell's `packed` says to the rows of its requests; captured."""


class OpSet(Protocol):
    """Makes ops; the ops of one set give a row the same bits whatever shares its call."""

    @property
    def name(self) -> str: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype:
        """Of matrices, KV and hidden states."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes with whatever decides which bits the ops give."""
        ...

    def layer_ops(self, rms_norm_eps: float) -> LayerOps:
        """Layer operations whose norms have this epsilon."""
        ...

    def attention(self, shape: AttentionShape) -> AttentionBackend:
        """Attention for these heads."""
        ...

    def verifier(self) -> GreedyVerify: ...

    def sampler(self, state: SamplerState, *, rejection: bool) -> CellOp:
        """Writes `processed` and `target_ids` of a cell's `logits`; see `sampling/cpu.py`."""
        ...

    def row_ops(self, rows: DeviceRows, block_size: int) -> RowOps: ...

    def logprobs(self) -> CellOp:
        """Writes `logprob_ids`, `logprob_values` and `logprob_ranks` of a cell."""
        ...

    def store_slots(self) -> StoreSlots:
        """Fills hidden states."""
        ...

    def draft_ops(
        self,
        rms_norm_eps: float,
        hidden_states: HiddenStates | None,
        rows: DeviceRows,
        *,
        block_size: int,
        draft_sampling: DraftSampling,
    ) -> DraftOps:
        """What a chain of drafts calls; `hidden_states` are the target's, `rows` requests'."""
        ...
