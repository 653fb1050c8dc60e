"""TorchOps: LayerOps whose glue is torch code, compiled by inductor or run as it is.

Linears (the activation between two of them included) and attention stay with the device's own
kernels, which are row-invariant; norms, rotation, embedding and argmax are the functions below.
Slower on CPU than `NativeOps` (more and smaller calls), and the form that other devices share.
"""

from __future__ import annotations

import torch

from capture.compile import PieceCompiler
from graphengine.models.layers import LayerOps, Rope

Tensor = torch.Tensor


class TorchOps:
    """LayerOps through a PieceCompiler.

    Args:
        compiler: says whether pieces are compiled.
        products: whose matrix products these are, with the activation between two of them.
        rms_norm_eps: of every norm.
        device: of the tensors.
    """

    def __init__(
        self,
        compiler: PieceCompiler,
        products: LayerOps,
        rms_norm_eps: float,
        device: torch.device,
    ) -> None:
        self._products = products
        self._eps = torch.tensor([rms_norm_eps], device=device)
        self._embed = compiler.piece("embed", embed, dynamic_rows=(0, 2))
        self._rms_norm = compiler.piece("rms_norm", rms_norm, dynamic_rows=(0, 1))
        self._rotate = compiler.piece("rotate", rotate, dynamic_rows=(0, 3))
        self._norm_heads = compiler.piece("norm_heads", norm_heads, dynamic_rows=(0,))
        self._write_kv = compiler.piece("write_kv", write_kv, dynamic_rows=(1, 2))
        self._argmax = compiler.piece("argmax", argmax, dynamic_rows=(0, 1))

    def embed(self, out: Tensor, table: Tensor, token_ids: Tensor) -> None:
        self._embed(out, table, token_ids)

    def rms_norm(self, out: Tensor, x: Tensor, weight: Tensor) -> None:
        self._rms_norm(out, x, weight, self._eps)

    def linear(
        self,
        out: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        add: bool = False,
    ) -> None:
        self._products.linear(out, x, weight, bias, add=add)

    def gate_up(self, out: Tensor, x: Tensor, weight: Tensor) -> None:
        # Torch's own silu rounds the last numbers of a thread's range otherwise than the others, so
        # that a row's bits would depend on how many rows there are.
        self._products.gate_up(out, x, weight)

    def rope_write(
        self,
        qkv: Tensor,
        kv_cache: Tensor,
        rope: Rope,
        positions: Tensor,
        slot_mapping: Tensor,
        qk_norm: tuple[Tensor, Tensor] | None,
    ) -> None:
        heads = qkv.view(qkv.shape[0], -1, rope.head_dim)
        if qk_norm is not None:
            self._norm_heads(heads, *qk_norm, rope.num_kv_heads, self._eps)
        self._rotate(heads, rope.cos, rope.sin, positions, rope.num_kv_heads)
        self._write_kv(kv_cache, heads, slot_mapping, rope.num_kv_heads)

    def argmax(self, out: Tensor, logits: Tensor) -> None:
        self._argmax(out, logits)


def embed(out: Tensor, table: Tensor, token_ids: Tensor) -> None:
    """out [T, hidden] fp32 = table [vocab, hidden][token_ids [T]]."""
    out.copy_(table[token_ids])


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: Tensor) -> None:
    """out [T, hidden] = RMSNorm(x) * weight (Zhang and Sennrich 2019, eq. 4)."""
    out.copy_(_normalised(x, eps) * weight)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, num_kv_heads: int) -> None:
    """Rotate q and k of heads [T, heads + 2 kv_heads, dim] in place (Su et al. 2021, eq. 34)."""
    num_rotated = heads.shape[1] - num_kv_heads
    heads[:, :num_rotated] = _rotated(heads[:, :num_rotated], cos, sin, positions)


def norm_heads(
    heads: Tensor, q_norm: Tensor, k_norm: Tensor, num_kv_heads: int, eps: Tensor
) -> None:
    """RMS norm of each q and k head of heads [T, heads + 2 kv_heads, dim] over dim (Qwen3)."""
    num_rotated = heads.shape[1] - num_kv_heads
    num_heads = num_rotated - num_kv_heads
    q = _normalised(heads[:, :num_heads], eps) * q_norm
    k = _normalised(heads[:, num_heads:num_rotated], eps) * k_norm
    heads[:, :num_rotated] = torch.cat((q, k), dim=1)


def write_kv(kv_cache: Tensor, heads: Tensor, slot_mapping: Tensor, num_kv_heads: int) -> None:
    """Write k and v of heads [T, ..., dim] to the slots of kv_cache [blocks, 2, size, kv_heads,
    dim].
    """
    block, offset = slot_mapping // kv_cache.shape[2], slot_mapping % kv_cache.shape[2]
    k = heads[:, -2 * num_kv_heads : -num_kv_heads].to(kv_cache.dtype)
    v = heads[:, -num_kv_heads:].to(kv_cache.dtype)
    # Index tensors alone: with an integer among them inductor writes the whole cache back.
    first = torch.zeros_like(block)
    kv_cache[block, first, offset] = k
    kv_cache[block, first + 1, offset] = v


def argmax(out: Tensor, logits: Tensor) -> None:
    """out [T] int32: index of the largest number, the lowest on ties; 0 where there is only NaN."""
    width = logits.shape[-1]
    largest = torch.where(logits.isnan(), float("-inf"), logits).amax(-1, keepdim=True)
    index = torch.arange(width, dtype=torch.int32, device=logits.device)
    # A NaN equals nothing, so it is never chosen; a row of nothing else comes out as `width`.
    out.copy_(torch.where(logits == largest, index, width).amin(-1) % width)


def _normalised(x: Tensor, eps: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    cosine, sine = cos[positions][:, None], sin[positions][:, None]  # [T, 1, dim / 2]
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
