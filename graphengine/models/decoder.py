"""The decoder: Llama, Mistral, Qwen2 and Qwen3 as one list of layers over static buffers.

Owns the weights and the forward pass. Every line of `forward` is one op that writes into a buffer
it is handed, so the same code is run eagerly, bound, recorded and captured. Knows nothing of
requests, drafts or scheduling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from graphengine.attention.base import AttentionBackend, AttentionBatch
from graphengine.models.config import ModelConfig
from graphengine.models.layers import LayerOps, Rope
from graphengine.models.rope import rope_tables

Tensor = torch.Tensor


@dataclass(slots=True)
class LayerWeights:
    """One layer's parameters; matrices in the model dtype, norms and biases fp32."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [q_size + 2 kv_size, hidden]
    qkv_bias: Tensor | None  # [q_size + 2 kv_size]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    o: Tensor  # [hidden, q_size]
    o_bias: Tensor | None  # [hidden]
    post_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]
    down: Tensor  # [hidden, intermediate]


@dataclass(slots=True)
class DecoderWeights:
    """All parameters. Allocated empty; the loader fills the views of `destinations`."""

    embed: Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    final_norm: Tensor  # [hidden]
    lm_head: Tensor  # [vocab, hidden]; `embed` itself where tied

    @classmethod
    def allocate(
        cls, config: ModelConfig, dtype: torch.dtype, device: torch.device
    ) -> DecoderWeights:
        def matrix(rows: int, columns: int) -> Tensor:
            return torch.empty(rows, columns, dtype=dtype, device=device)

        def vector(size: int) -> Tensor:
            return torch.empty(size, dtype=torch.float32, device=device)

        hidden, qkv_size = config.hidden_size, config.q_size + 2 * config.kv_size
        layers = [
            LayerWeights(
                input_norm=vector(hidden),
                qkv=matrix(qkv_size, hidden),
                qkv_bias=vector(qkv_size) if config.qkv_bias else None,
                q_norm=vector(config.head_dim) if config.qk_norm else None,
                k_norm=vector(config.head_dim) if config.qk_norm else None,
                o=matrix(hidden, config.q_size),
                o_bias=vector(hidden) if config.o_bias else None,
                post_norm=vector(hidden),
                gate_up=matrix(2 * config.intermediate_size, hidden),
                down=matrix(hidden, config.intermediate_size),
            )
            for _ in range(config.num_layers)
        ]
        embed = matrix(config.vocab_size, hidden)
        lm_head = embed if config.tie_word_embeddings else matrix(config.vocab_size, hidden)
        return cls(embed=embed, layers=layers, final_norm=vector(hidden), lm_head=lm_head)

    def destinations(self, config: ModelConfig) -> dict[str, Tensor]:
        """Canonical checkpoint name -> the tensor or view that it is loaded into."""
        views = {"model.embed_tokens.weight": self.embed, "model.norm.weight": self.final_norm}
        if not config.tie_word_embeddings:
            views["lm_head.weight"] = self.lm_head
        for index, layer in enumerate(self.layers):
            views.update(_layer_destinations(f"model.layers.{index}.", layer, config))
        return views

    @property
    def num_bytes(self) -> int:
        tensors = [self.embed, self.final_norm] + (
            [] if self.lm_head is self.embed else [self.lm_head]
        )
        for layer in self.layers:
            tensors += [t for name in layer.__slots__ if (t := getattr(layer, name)) is not None]
        return sum(tensor.nbytes for tensor in tensors)


def _layer_destinations(prefix: str, layer: LayerWeights, config: ModelConfig) -> dict[str, Tensor]:
    sizes = [config.q_size, config.kv_size, config.kv_size]
    q, k, v = layer.qkv.split(sizes)
    gate, up = layer.gate_up.split(config.intermediate_size)
    views = {
        "input_layernorm.weight": layer.input_norm,
        "self_attn.q_proj.weight": q,
        "self_attn.k_proj.weight": k,
        "self_attn.v_proj.weight": v,
        "self_attn.o_proj.weight": layer.o,
        "post_attention_layernorm.weight": layer.post_norm,
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": layer.down,
    }
    if layer.qkv_bias is not None:
        names = ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")
        views.update(zip(names, layer.qkv_bias.split(sizes), strict=True))
    if layer.o_bias is not None:
        views["self_attn.o_proj.bias"] = layer.o_bias
    if layer.q_norm is not None and layer.k_norm is not None:
        views["self_attn.q_norm.weight"] = layer.q_norm
        views["self_attn.k_norm.weight"] = layer.k_norm
    return {prefix + name: view for name, view in views.items()}


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
    def of(cls, views: Mapping[str, Tensor]) -> ForwardBuffers:
        return cls(
            views["hidden"], views["normed"], views["qkv"], views["attended"], views["activated"]
        )

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
    """What the host writes before a forward."""

    token_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int32
    slot_mapping: Tensor  # [T] int32
    attention: AttentionBatch

    @classmethod
    def of(cls, views: Mapping[str, Tensor]) -> ForwardInputs:
        batch = AttentionBatch(views["block_table"], views["query_start_loc"], views["positions"])
        return cls(views["token_ids"], views["positions"], views["slot_mapping"], batch)


class Decoder:
    """See the module docstring.

    Args:
        config: sizes.
        weights: loaded parameters.
        kv_caches: one `[num_blocks, 2, block_size, num_kv_heads, head_dim]` a layer.
        ops, attention: the implementations to use.
        max_model_len: rows of the rotation tables.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        kv_caches: list[Tensor],
        *,
        ops: LayerOps,
        attention: AttentionBackend,
        max_model_len: int,
    ) -> None:
        assert len(kv_caches) == config.num_layers, "one KV cache a layer"
        cos, sin = rope_tables(config, max_model_len)
        self.config = config
        self.weights = weights
        self.ops = ops
        self.attention = attention
        self._kv_caches = kv_caches
        self.rope = Rope(
            cos=cos.contiguous(),
            sin=sin.contiguous(),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=kv_caches[0].shape[2],
        )

    def forward(self, inputs: ForwardInputs, buffers: ForwardBuffers) -> None:
        """Fill the KV rows of the inputs and leave the last layer's residual stream in
        `buffers.hidden`.
        """
        self.ops.embed(buffers.hidden, self.weights.embed, inputs.token_ids)
        for layer, kv_cache in zip(self.weights.layers, self._kv_caches, strict=True):
            self._attend(layer, kv_cache, inputs, buffers)
            self._feed_forward(layer, buffers)

    def _attend(
        self, layer: LayerWeights, kv_cache: Tensor, inputs: ForwardInputs, buffers: ForwardBuffers
    ) -> None:
        ops = self.ops
        qk_norm = (
            None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
        )
        ops.rms_norm(buffers.normed, buffers.hidden, layer.input_norm)
        ops.linear(buffers.qkv, buffers.normed, layer.qkv, layer.qkv_bias)
        ops.rope_write(
            buffers.qkv, kv_cache, self.rope, inputs.positions, inputs.slot_mapping, qk_norm
        )
        self.attention.run(buffers.attended, buffers.qkv, kv_cache, inputs.attention)
        ops.linear(buffers.hidden, buffers.attended, layer.o, layer.o_bias, add=True)

    def _feed_forward(self, layer: LayerWeights, buffers: ForwardBuffers) -> None:
        self.ops.rms_norm(buffers.normed, buffers.hidden, layer.post_norm)
        self.ops.gate_up(buffers.activated, buffers.normed, layer.gate_up)
        self.ops.linear(buffers.hidden, buffers.activated, layer.down, add=True)

    def logits(self, out: Tensor, buffers: ForwardBuffers) -> None:
        """out [T, vocab] fp32 from the residual stream of every row."""
        self.ops.rms_norm(buffers.normed, buffers.hidden, self.weights.final_norm)
        self.ops.linear(out, buffers.normed, self.weights.lm_head)
