"""TritonDraftOps: what a chain of drafts calls beside the layers, on a GPU.

Layer operations are those of the engine's `LayerOps`; see `proposers.device.DraftOps`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from capture.ops import CompiledOp
from graphengine.device_rows import DeviceRows
from graphengine.models.hidden_states import HiddenStates
from graphengine.models.layers import LayerOps
from graphengine.triton_kernels import rows as kernels
from graphengine.triton_kernels.choose import ChooseDrafts
from graphengine.triton_kernels.window import prepare_window
from proposers.base import DraftSampling
from proposers.device import WINDOW_READ, WINDOW_WRITTEN

Tensor = torch.Tensor


class TritonDraftOps:
    """See the module docstring.

    Args:
        layer_ops: embedding, norms and linears.
        hidden_states: of the target; None where nobody reads them.
        rows: of the requests.
        block_size: of the cache.
        draft_sampling: how drafts are chosen.
    """

    def __init__(
        self,
        layer_ops: LayerOps,
        hidden_states: HiddenStates | None,
        rows: DeviceRows,
        *,
        block_size: int,
        draft_sampling: DraftSampling,
    ) -> None:
        self.embed = layer_ops.embed
        self.rms_norm = layer_ops.rms_norm
        self.linear = layer_ops.linear
        self.zero_first = CompiledOp("zero_first", kernels.zero_first)
        self.concat = CompiledOp("concat_rows", kernels.concat_rows)
        self.take_rows = CompiledOp("take_rows", kernels.take_rows)
        self.shift_tokens = CompiledOp("shift_tokens", kernels.shift_tokens)
        self.choose = CompiledOp("choose_drafts", ChooseDrafts(draft_sampling))
        self._load_slots = CompiledOp("load_slots", kernels.load_slots)
        self._rows, self._block_size = rows, block_size
        self._prepare_window = CompiledOp("prepare_window", self._launch_window)
        self._states = None if hidden_states is None else hidden_states.storage

    def prepare_window(self, views: Mapping[str, Tensor], rules: Tensor) -> None:
        width = len(views["token_ids"]) // len(views["block_table"])
        buffers = (views[name] for name in (*WINDOW_WRITTEN, *WINDOW_READ))
        self._prepare_window(*buffers, rules, width)

    def _launch_window(self, *given: Tensor) -> None:
        *buffers, rules, width = given
        prepare_window(buffers, rules, self._rows, width=int(width), block=self._block_size)

    def load_slots(self, out: Tensor, slots: Tensor) -> None:
        assert self._states is not None, "the target keeps no hidden states"
        self._load_slots(out, self._states, slots)
