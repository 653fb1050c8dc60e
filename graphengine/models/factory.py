"""LayerFactory: layers and decoders out of the ops of one set, for target and drafts alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphengine.attention import cpu
from graphengine.attention.base import AttentionBackend, AttentionShape
from graphengine.models.block import Block, LayerWeights
from graphengine.models.config import ModelConfig
from graphengine.models.decoder import Decoder, DecoderWeights
from graphengine.models.hidden_states import HiddenStates
from graphengine.models.layers import Rope, make_rope
from graphengine.opset import OpSet

Tensor = torch.Tensor


def check_supported(config: ModelConfig, dtype: torch.dtype) -> None:
    """Whether layers of this model, target or draft, can be made; makes nothing.

    Raises:
        ValueError: they cannot; the message names key and value.
    """
    cpu.check_supported(dtype, config.head_dim)
    if config.mlp_bias:
        raise ValueError(
            "mlp_bias=True: MLP biases are not supported; use a checkpoint without them"
        )


def attention_shape(config: ModelConfig, block_size: int) -> AttentionShape:
    """Sizes of a model's heads over a cache of that block size."""
    return AttentionShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        sliding_window=config.sliding_window,
    )


class LayerFactory:
    """Makes decoders and single layers.

    Args:
        opset: what they are made of.
        max_model_len: positions that may occur.
    """

    def __init__(self, opset: OpSet, *, max_model_len: int) -> None:
        self.opset = opset
        self._max_model_len = max_model_len
        self._ropes: dict[tuple[ModelConfig, int], Rope] = {}

    def attention(self, config: ModelConfig, *, block_size: int) -> AttentionBackend:
        """Attention for the heads of a model."""
        return self.opset.attention(attention_shape(config, block_size))

    def decoder(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        kv_caches: Sequence[Tensor],
        hidden_states: HiddenStates | None = None,
        attention: AttentionBackend | None = None,
    ) -> Decoder:
        """A whole model over its KV caches; with attention of its own, or (None) the op set's."""
        return Decoder(
            config,
            weights,
            kv_caches,
            ops=self.opset.layer_ops(config.rms_norm_eps),
            attention=attention or self.attention(config, block_size=kv_caches[0].shape[2]),
            rope=self._rope(config, kv_caches[0].shape[2]),
            hidden_states=hidden_states,
        )

    def block(
        self,
        config: ModelConfig,
        kv_cache: Tensor,
        *,
        input_size: int | None = None,
    ) -> Block:
        """One layer over its KV cache, its weights still empty."""
        block_size = kv_cache.shape[2]
        return Block(
            config,
            LayerWeights.allocate(config, self.opset.dtype, kv_cache.device, input_size=input_size),
            kv_cache,
            ops=self.opset.layer_ops(config.rms_norm_eps),
            attention=self.attention(config, block_size=block_size),
            rope=self._rope(config, block_size),
        )

    def _rope(self, config: ModelConfig, block_size: int) -> Rope:
        """One for all layers of a config."""
        if (config, block_size) not in self._ropes:
            self._ropes[config, block_size] = make_rope(
                config, self._max_model_len, block_size=block_size, device=self.opset.device
            )
        return self._ropes[config, block_size]
