"""LayerFactory: which ops and which attention a model's layers are made of.

The one place that chooses between the native kernels and torch's pieces, for the target and for
drafts alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from capture.compile import PieceCompiler
from graphengine.attention import cpu
from graphengine.attention.base import AttentionShape
from graphengine.attention.cpu import NativeAttention
from graphengine.models.block import Block, LayerWeights
from graphengine.models.config import ModelConfig
from graphengine.models.decoder import Decoder, DecoderWeights
from graphengine.models.hidden_states import HiddenStates
from graphengine.models.layers import LayerOps, Rope, make_rope
from graphengine.models.native_ops import NativeOps
from graphengine.models.torch_ops import TorchOps

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


class LayerFactory:
    """Makes decoders and single layers.

    Args:
        dtype: of matrices and KV.
        max_model_len: positions that may occur.
        compiler: makes torch's pieces; None: the native kernels.
    """

    def __init__(
        self, dtype: torch.dtype, *, max_model_len: int, compiler: PieceCompiler | None
    ) -> None:
        self.dtype = dtype
        self._max_model_len = max_model_len
        self._compiler = compiler
        self._scratch: Tensor | None = None  # of attention: no two calls overlap
        self._ropes: dict[tuple[ModelConfig, int], Rope] = {}

    def ops(self, rms_norm_eps: float) -> LayerOps:
        """Operations whose norms have this epsilon."""
        if self._compiler is None:
            return NativeOps(self.dtype, rms_norm_eps)
        return TorchOps(self._compiler, self.dtype, rms_norm_eps)

    def attention(self, config: ModelConfig, *, block_size: int) -> NativeAttention:
        """Attention for the heads of a model."""
        shape = AttentionShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=block_size,
            sliding_window=config.sliding_window,
        )
        attention = NativeAttention(self.dtype, shape, self._scratch)
        self._scratch = attention.scratch
        return attention

    def decoder(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        kv_caches: Sequence[Tensor],
        hidden_states: HiddenStates | None = None,
    ) -> Decoder:
        """A whole model over its KV caches."""
        return Decoder(
            config,
            weights,
            kv_caches,
            ops=self.ops(config.rms_norm_eps),
            attention=self.attention(config, block_size=kv_caches[0].shape[2]),
            max_model_len=self._max_model_len,
            hidden_states=hidden_states,
        )

    def block(
        self,
        config: ModelConfig,
        kv_cache: Tensor,
        ops: LayerOps,
        *,
        input_size: int | None = None,
    ) -> Block:
        """One layer over its KV cache, its weights still empty."""
        block_size = kv_cache.shape[2]
        return Block(
            config,
            LayerWeights.allocate(config, self.dtype, kv_cache.device, input_size=input_size),
            kv_cache,
            ops=ops,
            attention=self.attention(config, block_size=block_size),
            rope=self._rope(config, block_size),
        )

    def _rope(self, config: ModelConfig, block_size: int) -> Rope:
        """One for all layers of a config."""
        if (config, block_size) not in self._ropes:
            self._ropes[config, block_size] = make_rope(
                config, self._max_model_len, block_size=block_size
            )
        return self._ropes[config, block_size]
