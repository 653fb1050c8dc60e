"""TritonOps: LayerOps by the project's own Triton kernels, for GPUs.

Owns the scratch of the kernels, and the way from a call to a launch that graphs and tapes see. All
of them compute a row in one fixed order, whatever shares the call.
"""

from __future__ import annotations

from functools import partial

import torch

from capture.ops import CompiledOp
from graphengine.models.layers import Rope
from graphengine.triton_kernels import gemm, rows
from graphengine.triton_kernels.rope import rope_write

Tensor = torch.Tensor


class TritonOps:
    """See the module docstring.

    Args:
        rms_norm_eps: of every norm.
        scratch: fp32, for partial sums; calls do not overlap, so all ops may share one.
    """

    def __init__(self, rms_norm_eps: float, scratch: Tensor) -> None:
        self._eps = rms_norm_eps
        self._scratch = scratch
        self._embed = CompiledOp("embed", rows.embed)
        self._rms_norm = CompiledOp("rms_norm", partial(rows.rms_norm, eps=rms_norm_eps))
        self._linear = CompiledOp("linear", self._launch_linear)
        self._gate_up = CompiledOp("gate_up", gemm.gate_up)
        self._argmax = CompiledOp("argmax", self._launch_argmax)
        self._rope_writes: dict[int, CompiledOp] = {}  # by the rope's id, which the op keeps alive

    def embed(self, out: Tensor, table: Tensor, token_ids: Tensor) -> None:
        self._embed(out, table, token_ids)

    def rms_norm(self, out: Tensor, x: Tensor, weight: Tensor) -> None:
        self._rms_norm(out, x, weight)

    def linear(
        self,
        out: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        add: bool = False,
    ) -> None:
        self._linear(out, x, weight, bias, self._scratch, int(add))

    def gate_up(self, out: Tensor, x: Tensor, weight: Tensor) -> None:
        self._gate_up(out, x, weight, self._scratch)

    def rope_write(
        self,
        qkv: Tensor,
        kv_cache: Tensor,
        rope: Rope,
        positions: Tensor,
        slot_mapping: Tensor,
        qk_norm: tuple[Tensor, Tensor] | None,
    ) -> None:
        if id(rope) not in self._rope_writes:
            launch = partial(_launch_rope_write, rope, self._eps)
            self._rope_writes[id(rope)] = CompiledOp("rope_write", launch)
        norms = qk_norm if qk_norm is not None else (None, None)
        op = self._rope_writes[id(rope)]
        op(qkv, kv_cache, rope.cos, rope.sin, positions, slot_mapping, *norms)

    def argmax(self, out: Tensor, logits: Tensor) -> None:
        self._argmax(out, logits, self._scratch)

    def _launch_linear(
        self, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Tensor | int
    ) -> None:
        scratch, add = rest
        assert isinstance(scratch, Tensor), f"{scratch!r} is no scratch"
        gemm.linear(out, x, weight, bias, scratch, add=bool(add))

    def _launch_argmax(self, out: Tensor, logits: Tensor, scratch: Tensor) -> None:
        half = len(scratch) // 2
        rows.argmax(out, logits, scratch[:half], scratch[half:].view(torch.int32))


def _launch_rope_write(
    rope: Rope, eps: float, qkv: Tensor, kv_cache: Tensor, *rest: Tensor | None
) -> None:
    cos, sin, positions, slots, q_norm, k_norm = rest
    assert cos is not None
    assert sin is not None
    assert positions is not None
    assert slots is not None
    rope_write(qkv, kv_cache, (cos, sin), (positions, slots), (q_norm, k_norm), rope=rope, eps=eps)
