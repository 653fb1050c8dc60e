"""A whole checkpoint as a draft model (`proposers.device.OpenedDecoder` and `DraftDecoder`).

The decoder is the engine's own, over the draft's KV caches. Its vocabulary is cut to the target's:
rows that only pad the larger of the two are never drafted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphengine.models.block import ForwardBuffers, ForwardInputs
from graphengine.models.config import ModelConfig
from graphengine.models.decoder import Decoder, DecoderWeights
from graphengine.models.factory import LayerFactory
from graphengine.models.loader import OpenedModel, load_weights
from proposers.device import DraftRuntime

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class OpenedDraftDecoder:
    """A draft model whose headers have been read."""

    opened: OpenedModel
    dtype: torch.dtype
    target_vocab_size: int

    @property
    def architecture(self) -> ModelConfig:
        return self.opened.config

    @property
    def num_weight_bytes(self) -> int:
        meta = torch.device("meta")
        return DecoderWeights.allocate(self.opened.config, self.dtype, meta).num_bytes

    def load(self, runtime: DraftRuntime) -> CutDecoder:
        """Read the weights."""
        config = self.opened.config
        weights = DecoderWeights.allocate(config, self.dtype, runtime.device)
        load_weights(weights.destinations(config), self.opened.source, config=config)
        layers = runtime.layers
        assert isinstance(layers, LayerFactory), f"{layers!r} is of another engine"
        decoder = layers.decoder(config, weights, runtime.kv_caches)
        return CutDecoder(decoder, min(config.vocab_size, self.target_vocab_size))


class CutDecoder:
    """A decoder that gives the logits of the first `vocab_size` ids alone."""

    def __init__(self, decoder: Decoder, vocab_size: int) -> None:
        self._decoder = decoder
        self._head = decoder.weights.lm_head[:vocab_size]

    def forward(self, inputs: ForwardInputs, buffers: ForwardBuffers) -> None:
        self._decoder.forward(inputs, buffers)

    def logits(self, out: Tensor, hidden: Tensor, normed: Tensor) -> None:
        """out [T, vocab_size] fp32 from the residual stream; `normed` is scratch."""
        self._decoder.ops.rms_norm(normed, hidden, self._decoder.weights.final_norm)
        self._decoder.ops.linear(out, normed, self._head)
