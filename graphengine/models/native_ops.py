"""NativeOps: LayerOps and paged attention by the project's own C++ kernels, for CPU.

Owns the translation from tensors to the kernels' C arguments and the checks of layout that C cannot
make. The kernels compute every row in one fixed order, so rows are bit-equal whatever shares the
call.
"""

from __future__ import annotations

import torch

from capture.ops import NativeOp
from graphengine.attention.base import AttentionBatch, AttentionShape
from graphengine.kernels import library
from graphengine.models.layers import Rope

Tensor = torch.Tensor

# Partials of split-KV attention; larger problems take the one-thread-a-row schedule, with the same
# bits.
ATTENTION_SCRATCH_FLOATS = 4 << 20

_SUFFIX = {torch.bfloat16: "bf16", torch.float32: "f32"}


def native_op(name: str) -> NativeOp:
    """The op of an exported kernel."""
    return NativeOp(name, library.address(name), len(library.FUNCTIONS[name].arguments))


def kernel_suffix(dtype: torch.dtype) -> str:
    """Suffix of the kernels for a stored dtype.

    Raises:
        ValueError: there are none for it.
    """
    if dtype not in _SUFFIX:
        raise ValueError(f"dtype {dtype} has no CPU kernels; use bfloat16 or float32")
    return _SUFFIX[dtype]


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
        _check_contiguous(out, table, token_ids)
        self._embed(out, table, token_ids, out.shape[0], table.shape[1])

    def rms_norm(self, out: Tensor, x: Tensor, weight: Tensor) -> None:
        _check_contiguous(out, x, weight)
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
        _check_contiguous(out, x, weight)
        n, k = weight.shape
        fits = x.shape[1] == k and out.shape[1] == n
        assert fits, f"linear {x.shape} x {weight.shape} -> {out.shape}"
        self._linear(out, x, weight, bias, x.shape[0], n, k, int(add))

    def gate_up(self, out: Tensor, x: Tensor, weight: Tensor) -> None:
        _check_contiguous(out, x, weight)
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
        _check_contiguous(qkv, kv_cache, positions, slot_mapping)
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
        _check_contiguous(out, logits)
        self._argmax(out, logits, logits.shape[0], logits.shape[1])


class NativeAttention:
    """Paged attention in place, over fixed-size KV chunks combined in order. Cost grows with the
    real context.
    """

    name = "native"

    def __init__(self, dtype: torch.dtype, shape: AttentionShape) -> None:
        self._op = native_op(f"paged_attention_{kernel_suffix(dtype)}")
        self._shape = shape
        self._scratch = torch.zeros(ATTENTION_SCRATCH_FLOATS, dtype=torch.float32)

    def plan(self, batch: AttentionBatch) -> None:
        """Nothing: the kernel reads lengths and tables from the batch's tensors."""

    def run(self, out: Tensor, qkv: Tensor, kv_cache: Tensor, batch: AttentionBatch) -> None:
        _check_contiguous(
            out, qkv, kv_cache, batch.block_table, batch.query_start_loc, batch.positions
        )
        shape = self._shape
        self._op(
            out,
            qkv,
            kv_cache,
            batch.block_table,
            batch.query_start_loc,
            batch.positions,
            batch.block_table.shape[0],
            batch.block_table.shape[1],
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.block_size,
            shape.sliding_window or 0,
            self._scratch,
            self._scratch.numel(),
        )


def _check_contiguous(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.is_contiguous(), (
            f"kernel argument of shape {tuple(tensor.shape)} is not contiguous"
        )
