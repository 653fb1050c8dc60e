"""The decoder: Llama, Mistral, Qwen2 and Qwen3 as one list of layers over static buffers.

Owns the weights and the forward pass. Every line of `forward` is one op that writes into a buffer
it is handed, so the same code is run eagerly, bound, recorded and captured. Knows nothing of
requests, drafts or scheduling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphengine.attention.base import AttentionBackend
from graphengine.models.block import Block, ForwardBuffers, ForwardInputs, LayerWeights
from graphengine.models.config import ModelConfig
from graphengine.models.hidden_states import HiddenStates
from graphengine.models.layers import LayerOps, Rope
from proposers.device import FINAL, Tap

Tensor = torch.Tensor


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

        embed = matrix(config.vocab_size, config.hidden_size)
        return cls(
            embed=embed,
            layers=[LayerWeights.allocate(config, dtype, device) for _ in range(config.num_layers)],
            final_norm=torch.empty(config.hidden_size, dtype=torch.float32, device=device),
            lm_head=(
                embed
                if config.tie_word_embeddings
                else matrix(config.vocab_size, config.hidden_size)
            ),
        )

    def destinations(self, config: ModelConfig) -> dict[str, Tensor]:
        """Canonical checkpoint name -> the tensor or view that it is loaded into."""
        views = {"model.embed_tokens.weight": self.embed, "model.norm.weight": self.final_norm}
        if not config.tie_word_embeddings:
            views["lm_head.weight"] = self.lm_head
        for index, layer in enumerate(self.layers):
            parts = layer.destinations(config)
            views |= {f"model.layers.{index}.{name}": view for name, view in parts.items()}
        return views

    @property
    def num_bytes(self) -> int:
        tensors = [self.embed, self.final_norm] + (
            [] if self.lm_head is self.embed else [self.lm_head]
        )
        layers = sum(layer.num_bytes for layer in self.layers)
        return layers + sum(tensor.nbytes for tensor in tensors)


class Decoder:
    """See the module docstring.

    Args:
        config: sizes.
        weights: loaded parameters.
        kv_caches: one `[num_blocks, 2, block_size, num_kv_heads, head_dim]` a layer.
        ops, attention: the implementations to use.
        rope: rotation tables and sizes.
        hidden_states: keeps what somebody wants to read of the residual stream; None: nobody does.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        kv_caches: Sequence[Tensor],
        *,
        ops: LayerOps,
        attention: AttentionBackend,
        rope: Rope,
        hidden_states: HiddenStates | None = None,
    ) -> None:
        self.config = config
        self.weights = weights
        self.ops = ops
        self.attention = attention
        self.rope = rope
        self.hidden_states = hidden_states
        self.kv_caches = kv_caches
        self._blocks = [
            Block(config, layer, kv_cache, ops=ops, attention=attention, rope=self.rope)
            for layer, kv_cache in zip(weights.layers, kv_caches, strict=True)
        ]

    def forward(self, inputs: ForwardInputs, buffers: ForwardBuffers) -> None:
        """Fill the KV rows of the inputs and leave the last layer's residual stream in
        `buffers.hidden`.
        """
        self.ops.embed(buffers.hidden, self.weights.embed, inputs.token_ids)
        self._keep(0, buffers.hidden, inputs)
        for depth, block in enumerate(self._blocks, start=1):
            self.ops.rms_norm(buffers.normed, buffers.hidden, block.input_norm)
            block.attend(buffers.normed, inputs, buffers)
            block.feed_forward(buffers)
            self._keep(depth, buffers.hidden, inputs)
        if self.hidden_states is not None and FINAL in self.hidden_states.taps:
            self.ops.rms_norm(buffers.normed, buffers.hidden, self.weights.final_norm)
            self._keep(FINAL, buffers.normed, inputs)

    def _keep(self, tap: Tap, x: Tensor, inputs: ForwardInputs) -> None:
        if self.hidden_states is not None:
            self.hidden_states.store(tap, x, inputs.slot_mapping)

    def logits(self, out: Tensor, hidden: Tensor, normed: Tensor) -> None:
        """out [T, vocab] fp32 from the residual stream hidden [T, hidden].

        Args:
            normed: [T, hidden], scratch; may not be `hidden`.
        """
        self.ops.rms_norm(normed, hidden, self.weights.final_norm)
        self.ops.linear(out, normed, self.weights.lm_head)
