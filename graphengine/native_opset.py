"""NativeOpSet: the ops of a step on CPU, own C++ kernels with or without torch's pieces among them.

Owns which of the two an op is. A step is a handful of small ops between matrix products, so on CPU
the kernels are the faster form; torch's pieces are what other devices share.
"""

from __future__ import annotations

import torch

from capture.compile import PieceCompiler
from graphengine.attention.base import AttentionShape
from graphengine.attention.cpu import NativeAttention
from graphengine.device_rows import DeviceRows
from graphengine.draft_ops import NativeDraftOps
from graphengine.kernels import build
from graphengine.kernels.ops import check_contiguous, kernel_suffix, native_op
from graphengine.models.hidden_states import HiddenStates, StoreSlots
from graphengine.models.layers import LayerOps
from graphengine.models.native_ops import NativeOps
from graphengine.models.torch_ops import TorchOps
from graphengine.opset import CellOp
from graphengine.row_ops import NativeRowOps
from graphengine.sampling.cpu import NativeGreedyVerify, NativeLogprobs, NativeSampler
from graphengine.sampling.state import SamplerState
from graphengine.sampling.verifier import GreedyVerify, greedy_verify
from proposers.base import DraftSampling

Tensor = torch.Tensor


class NativeOpSet:
    """See the module docstring.

    Args:
        dtype: of matrices, KV and hidden states.
        compiler: makes torch's pieces; None: kernels alone.
    """

    device = torch.device("cpu")

    def __init__(self, dtype: torch.dtype, compiler: PieceCompiler | None = None) -> None:
        self.name = "native" if compiler is None else compiler.mode
        self.dtype = dtype
        self._compiler = compiler
        self._layer_ops: dict[float, LayerOps] = {}
        self._scratch: Tensor | None = None  # of attention: no two calls overlap

    @property
    def fingerprint(self) -> str:
        return f"{self.name} {build.library_key()}"

    def layer_ops(self, rms_norm_eps: float) -> LayerOps:
        if rms_norm_eps not in self._layer_ops:
            ops = NativeOps(self.dtype, rms_norm_eps)
            self._layer_ops[rms_norm_eps] = (
                ops
                if self._compiler is None
                else TorchOps(self._compiler, ops, rms_norm_eps, self.device)
            )
        return self._layer_ops[rms_norm_eps]

    def attention(self, shape: AttentionShape) -> NativeAttention:
        attention = NativeAttention(self.dtype, shape, self._scratch)
        self._scratch = attention.scratch
        return attention

    def verifier(self) -> GreedyVerify:
        if self._compiler is None:
            return NativeGreedyVerify()
        return self._compiler.piece("greedy_verify", greedy_verify)

    def sampler(self, state: SamplerState, *, rejection: bool) -> CellOp:
        return NativeSampler(state, rejection=rejection)

    def row_ops(self, rows: DeviceRows, block_size: int) -> NativeRowOps:
        return NativeRowOps(rows, block_size)

    def logprobs(self) -> CellOp:
        return NativeLogprobs()

    def store_slots(self) -> StoreSlots:
        op = native_op(f"store_slots_{kernel_suffix(self.dtype)}")

        def store(
            storage: Tensor, x: Tensor, slot_mapping: Tensor, column: int, num_null_slots: int
        ) -> None:
            check_contiguous(storage, x, slot_mapping)
            op(storage, x, slot_mapping, *x.shape, storage.shape[1], column, num_null_slots)

        return store

    def draft_ops(
        self,
        rms_norm_eps: float,
        hidden_states: HiddenStates | None,
        rows: DeviceRows,
        *,
        block_size: int,
        draft_sampling: DraftSampling,
    ) -> NativeDraftOps:
        return NativeDraftOps(
            self.layer_ops(rms_norm_eps),
            hidden_states,
            rows,
            block_size=block_size,
            draft_sampling=draft_sampling,
        )
