"""One transformer layer over static buffers: its weights, and attention and MLP as ops.

What goes into attention is the caller's business: the decoder hands over the normed residual
stream, the heads that draft something wider. Every line is one op that writes into a buffer it is
handed, so the same code is run eagerly, bound, recorded and captured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch

from graphengine.attention.base import AttentionBackend, AttentionBatch
from graphengine.models.config import ModelConfig
from graphengine.models.layers import LayerOps, Rope

Tensor = torch.Tensor


@dataclass(slots=True)
class LayerWeights:
    """One layer's parameters; matrices in the model dtype, norms and biases fp32."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [q_size + 2 kv_size, input_size]
    qkv_bias: Tensor | None  # [q_size + 2 kv_size]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    o: Tensor  # [hidden, q_size]
    o_bias: Tensor | None  # [hidden]
    post_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]
    down: Tensor  # [hidden, intermediate]

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        input_size: int | None = None,
    ) -> LayerWeights:
        """Empty parameters of a layer.

        Args:
            input_size: columns of q, k and v; None: `hidden_size`.
        """

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.empty(rows, columns, dtype=dtype, device=device)

        def vector(size: int) -> Tensor:
            return torch.empty(size, dtype=torch.float32, device=device)

        hidden, qkv_size = config.hidden_size, config.q_size + 2 * config.kv_size
        return cls(
            input_norm=vector(hidden),
            qkv=matrix(qkv_size, input_size or hidden),
            qkv_bias=vector(qkv_size) if config.qkv_bias else None,
            q_norm=vector(config.head_dim) if config.qk_norm else None,
            k_norm=vector(config.head_dim) if config.qk_norm else None,
            o=matrix(hidden, config.q_size),
            o_bias=vector(hidden) if config.o_bias else None,
            post_norm=vector(hidden),
            gate_up=matrix(2 * config.intermediate_size, hidden),
            down=matrix(hidden, config.intermediate_size),
        )

    def destinations(self, config: ModelConfig) -> dict[str, Tensor]:
        """Name within the layer, as checkpoints have it -> the tensor or view it is loaded into."""
        sizes = [config.q_size, config.kv_size, config.kv_size]
        q, k, v = self.qkv.split(sizes)
        gate, up = self.gate_up.split(config.intermediate_size)
        views = {
            "input_layernorm.weight": self.input_norm,
            "self_attn.q_proj.weight": q,
            "self_attn.k_proj.weight": k,
            "self_attn.v_proj.weight": v,
            "self_attn.o_proj.weight": self.o,
            "post_attention_layernorm.weight": self.post_norm,
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": self.down,
        }
        if self.qkv_bias is not None:
            names = ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")
            views.update(zip(names, self.qkv_bias.split(sizes), strict=True))
        if self.o_bias is not None:
            views["self_attn.o_proj.bias"] = self.o_bias
        if self.q_norm is not None and self.k_norm is not None:
            views["self_attn.q_norm.weight"] = self.q_norm
            views["self_attn.k_norm.weight"] = self.k_norm
        return views

    @property
    def num_bytes(self) -> int:
        parts = [getattr(self, name) for name in self.__slots__]
        return sum(part.nbytes for part in parts if part is not None)


@dataclass(frozen=True, slots=True)
class ForwardBuffers:
    """Activations of one forward, views of static buffers; written and read only inside it. All
    fp32.
    """

    hidden: Tensor  # [T, hidden], the residual stream
    normed: Tensor  # [T, hidden]
    qkv: Tensor  # [T, q_size + 2 kv_size]
    attended: Tensor  # [T, q_size]
    activated: Tensor  # [T, intermediate]

    @classmethod
    def of(cls, views: Mapping[str, Tensor], prefix: str = "") -> ForwardBuffers:
        """The buffers that are named so behind a prefix."""
        return cls(*(views[prefix + field.name] for field in fields(cls)))

    def with_hidden(self, hidden: Tensor) -> ForwardBuffers:
        """The same scratch around another residual stream."""
        return replace(self, hidden=hidden)

    def rows(self, rows: slice) -> ForwardBuffers:
        """Views of these rows."""
        return ForwardBuffers(
            self.hidden[rows],
            self.normed[rows],
            self.qkv[rows],
            self.attended[rows],
            self.activated[rows],
        )


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """What is written before a forward, by the host or by the step's first op."""

    token_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int32
    slot_mapping: Tensor  # [T] int32
    attention: AttentionBatch

    @classmethod
    def of(cls, views: Mapping[str, Tensor], max_query_len: int | None = None) -> ForwardInputs:
        """Of a prefill, or (None) of a cell, whose requests all have as many rows."""
        table, positions = views["block_table"], views["positions"]
        longest = len(positions) // len(table) if max_query_len is None else max_query_len
        batch = AttentionBatch(table, views["query_start_loc"], positions, longest)
        return cls(views["token_ids"], positions, views["slot_mapping"], batch)


class Block:
    """A layer, ready to run.

    Args:
        config: sizes.
        weights: parameters, which may still be loaded.
        kv_cache: `[num_blocks, 2, block_size, num_kv_heads, head_dim]`.
        ops, attention: the implementations to use.
        rope: rotation tables and sizes.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: LayerWeights,
        kv_cache: Tensor,
        *,
        ops: LayerOps,
        attention: AttentionBackend,
        rope: Rope,
    ) -> None:
        self.weights = weights
        self._config = config
        self._kv_cache = kv_cache
        self._ops = ops
        self._attention = attention
        self._rope = rope

    @property
    def input_norm(self) -> Tensor:
        """[hidden] fp32; what it normalises is the caller's business."""
        return self.weights.input_norm

    def inputs(self) -> tuple[Tensor]:
        """Matrices [n, input_size] that read what `attend` is given."""
        return (self.weights.qkv,)

    def destinations(self) -> dict[str, Tensor]:
        """Name within the layer -> the tensor or view it is loaded into."""
        return self.weights.destinations(self._config)

    def attend(self, x: Tensor, inputs: ForwardInputs, buffers: ForwardBuffers) -> None:
        """Fill the layer's KV rows of the inputs and add attention's output to `buffers.hidden`.

        Args:
            x: [T, input_size], what q, k and v are made of.
        """
        ops, weights = self._ops, self.weights
        qk_norm = (
            None
            if weights.q_norm is None or weights.k_norm is None
            else (weights.q_norm, weights.k_norm)
        )
        ops.linear(buffers.qkv, x, weights.qkv, weights.qkv_bias)
        ops.rope_write(
            buffers.qkv, self._kv_cache, self._rope, inputs.positions, inputs.slot_mapping, qk_norm
        )
        self._attention.run(buffers.attended, buffers.qkv, self._kv_cache, inputs.attention)
        ops.linear(buffers.hidden, buffers.attended, weights.o, weights.o_bias, add=True)

    def feed_forward(self, buffers: ForwardBuffers) -> None:
        """Add the MLP's output to `buffers.hidden`."""
        ops, weights = self._ops, self.weights
        ops.rms_norm(buffers.normed, buffers.hidden, weights.post_norm)
        ops.gate_up(buffers.activated, buffers.normed, weights.gate_up)
        ops.linear(buffers.hidden, buffers.activated, weights.down, add=True)
