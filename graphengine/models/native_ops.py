"""NativeOps: LayerOps by the project's own C++ kernels, for CPU.

Owns the translation from tensors to the kernels' C arguments. The kernels compute every row in one
fixed order, so rows are bit-equal whatever shares the call.
"""

from __future__ import annotations

import torch

from graphengine.kernels.ops import check_contiguous, kernel_suffix, native_op
from graphengine.models.layers import Rope

Tensor = torch.Tensor


class NativeOps:
    """LayerOps over tensors on CPU. `dtype` is that of matrices and KV; everything else is fp32."""

    def __init__(self, dtype: torch.dtype, rms_norm_eps: float) -> None:
        suffix = kernel_suffix(dtype)
        self._eps = torch.tensor([rms_norm_eps], dtype=torch.float32)
        self._embed = native_op(f"embed_{suffix}")
        self._rms_norm = native_op("rms_norm")
        self._linear = native_op(f"linear_{suffix}")
        self._gate_up = native_op(f"gate_up_{suffix}")
        self._rope_write = native_op(f"rope_write_{suffix}")
        self._argmax = native_op("argmax_rows")

    def embed(self, out: Tensor, table: Tensor, token_ids: Tensor) -> None:
        check_contiguous(out, table, token_ids)
        self._embed(out, table, token_ids, out.shape[0], table.shape[1])

    def rms_norm(self, out: Tensor, x: Tensor, weight: Tensor) -> None:
        check_contiguous(out, x, weight)
        self._rms_norm(out, x, weight, x.shape[0], x.shape[1], self._eps)

    def linear(
        self,
        out: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        add: bool = False,
    ) -> None:
        check_contiguous(out, x, weight)
        n, k = weight.shape
        fits = x.shape[1] == k and out.shape[1] == n
        assert fits, f"linear {x.shape} x {weight.shape} -> {out.shape}"
        self._linear(out, x, weight, bias, x.shape[0], n, k, int(add))

    def gate_up(self, out: Tensor, x: Tensor, weight: Tensor) -> None:
        check_contiguous(out, x, weight)
        self._gate_up(out, x, weight, x.shape[0], weight.shape[0] // 2, weight.shape[1])

    def rope_write(
        self,
        qkv: Tensor,
        kv_cache: Tensor,
        rope: Rope,
        positions: Tensor,
        slot_mapping: Tensor,
        qk_norm: tuple[Tensor, Tensor] | None,
    ) -> None:
        check_contiguous(qkv, kv_cache, positions, slot_mapping)
        q_norm, k_norm = qk_norm if qk_norm is not None else (None, None)
        self._rope_write(
            qkv,
            kv_cache,
            rope.cos,
            rope.sin,
            positions,
            slot_mapping,
            qkv.shape[0],
            rope.num_heads,
            rope.num_kv_heads,
            rope.head_dim,
            rope.block_size,
            q_norm,
            k_norm,
            self._eps,
        )

    def argmax(self, out: Tensor, logits: Tensor) -> None:
        check_contiguous(out, logits)
        self._argmax(out, logits, logits.shape[0], logits.shape[1])
