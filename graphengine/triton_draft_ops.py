"""TritonDraftOps: what a chain of drafts calls beside the layers, on a GPU.

Layer operations are those of the engine's `LayerOps`; see `proposers.device.DraftOps`.
"""

from __future__ import annotations

import torch

from capture.ops import CompiledOp
from graphengine.models.hidden_states import HiddenStates
from graphengine.models.layers import LayerOps
from graphengine.triton_kernels import rows
from graphengine.triton_kernels.choose import ChooseDrafts
from proposers.base import DraftSampling

Tensor = torch.Tensor


class TritonDraftOps:
    """See the module docstring.

    Args:
        layer_ops: embedding, norms and linears.
        hidden_states: of the target; None where nobody reads them.
        draft_sampling: how drafts are chosen.
    """

    def __init__(
        self,
        layer_ops: LayerOps,
        hidden_states: HiddenStates | None,
        *,
        draft_sampling: DraftSampling,
    ) -> None:
        self.embed = layer_ops.embed
        self.rms_norm = layer_ops.rms_norm
        self.linear = layer_ops.linear
        self.zero_first = CompiledOp("zero_first", rows.zero_first)
        self.concat = CompiledOp("concat_rows", rows.concat_rows)
        self.take_rows = CompiledOp("take_rows", rows.take_rows)
        self.shift_tokens = CompiledOp("shift_tokens", rows.shift_tokens)
        self.choose = CompiledOp("choose_drafts", ChooseDrafts(draft_sampling))
        self._load_slots = CompiledOp("load_slots", rows.load_slots)
        self._states = None if hidden_states is None else hidden_states.storage

    def load_slots(self, out: Tensor, slots: Tensor) -> None:
        assert self._states is not None, "the target keeps no hidden states"
        self._load_slots(out, self._states, slots)
