"""TritonOpSet: the ops of a step on a GPU, own Triton kernels with or without torch's pieces.

Owns the scratch that they share, and which of two forms an op has: a Triton kernel, or, where a
compiler is given, torch code compiled by it (matrix products, attention and sampling stay kernels:
they must give a row the same bits whatever shares the call). Runs on tensors of the CPU, too, where
triton interprets its kernels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch
import triton

from capture.compile import PieceCompiler
from capture.ops import CompiledOp
from graphengine.attention.base import AttentionShape
from graphengine.attention.triton import TritonAttention
from graphengine.device_rows import DeviceRows
from graphengine.models.hidden_states import HiddenStates, StoreSlots
from graphengine.models.layers import LayerOps
from graphengine.models.torch_ops import TorchOps
from graphengine.models.triton_ops import TritonOps
from graphengine.opset import GPU_PRODUCT_FLOATS, CellOp
from graphengine.sampling.state import SamplerState
from graphengine.sampling.triton import TritonLogprobs, TritonSampler
from graphengine.sampling.verifier import GreedyVerify
from graphengine.triton_draft_ops import TritonDraftOps
from graphengine.triton_kernels.gemm import LEAST_SCRATCH, scratch_floats
from graphengine.triton_kernels.rows import argmax_floats, store_slots
from graphengine.triton_kernels.verify import greedy_verify
from graphengine.triton_row_ops import TritonRowOps
from proposers.base import DraftSampling

Tensor = torch.Tensor

ATTENTION_FLOATS_ON_CPU = 1 << 20  # interpreted: tiny models alone


class TritonOpSet:
    """See the module docstring.

    Args:
        dtype: of matrices, KV and hidden states.
        device: of all tensors.
        max_rows: rows of the largest forward.
        shapes: (n, k) of the target's matrices.
        vocab_size: columns of the logits.
        compiler: makes torch's pieces; None: kernels alone.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_rows: int,
        shapes: Iterable[tuple[int, int]],
        vocab_size: int,
        compiler: PieceCompiler | None = None,
    ) -> None:
        self.name = "triton" if compiler is None else f"triton and {compiler.mode}"
        self.dtype = dtype
        self.device = device
        self._compiler = compiler
        products = min(scratch_floats(max_rows, shapes), GPU_PRODUCT_FLOATS)
        # A draft has matrices of other shapes, of which nothing is known here.
        needed = max(products, LEAST_SCRATCH, argmax_floats(max_rows, vocab_size))
        self._scratch = torch.zeros(needed, device=device)
        self._partials: Tensor | None = None  # of attention: no two calls overlap
        self._layer_ops: dict[float, LayerOps] = {}

    @property
    def fingerprint(self) -> str:
        """Of sources, compiler and device."""
        package = Path(__file__).parent
        patterns = ("**/triton*.py", "triton_kernels/*.py", "attention/flashinfer*.py")
        sources = {source for pattern in patterns for source in package.glob(pattern)}
        digest = hashlib.blake2b(digest_size=12)
        for source in sorted(sources):
            digest.update(source.read_bytes())
        is_cuda = self.device.type == "cuda"
        device = torch.cuda.get_device_name(self.device) if is_cuda else "interpreted"
        return f"{self.name} {digest.hexdigest()} triton {triton.__version__} {device}"

    def layer_ops(self, rms_norm_eps: float) -> LayerOps:
        if rms_norm_eps not in self._layer_ops:
            ops = TritonOps(rms_norm_eps, self._scratch)
            self._layer_ops[rms_norm_eps] = (
                ops
                if self._compiler is None
                else TorchOps(self._compiler, ops, rms_norm_eps, self.device)
            )
        return self._layer_ops[rms_norm_eps]

    def attention(self, shape: AttentionShape) -> TritonAttention:
        if self._partials is None and self.device.type == "cpu":
            self._partials = torch.zeros(ATTENTION_FLOATS_ON_CPU)
        attention = TritonAttention(shape, self.device, self._partials)
        self._partials = attention.scratch
        return attention

    def verifier(self) -> GreedyVerify:
        return CompiledOp("greedy_verify", greedy_verify)

    def sampler(self, state: SamplerState, *, rejection: bool) -> CellOp:
        return TritonSampler(state, rejection=rejection)

    def row_ops(self, rows: DeviceRows, block_size: int) -> TritonRowOps:
        return TritonRowOps(rows, block_size)

    def logprobs(self) -> CellOp:
        return TritonLogprobs()

    def store_slots(self) -> StoreSlots:
        return CompiledOp("store_slots", store_slots)

    def draft_ops(
        self,
        rms_norm_eps: float,
        hidden_states: HiddenStates | None,
        rows: DeviceRows,
        *,
        block_size: int,
        draft_sampling: DraftSampling,
    ) -> TritonDraftOps:
        return TritonDraftOps(
            self.layer_ops(rms_norm_eps),
            hidden_states,
            rows,
            block_size=block_size,
            draft_sampling=draft_sampling,
        )
