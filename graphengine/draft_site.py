"""The engine as a model-carrying proposer sees it before weights are read (`proposers.device`).

Owns what can be told from headers: sizes of target and draft, whether they speak the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graphengine.draft_decoder import OpenedDraftDecoder
from graphengine.models.block import LayerWeights
from graphengine.models.config import ModelConfig
from graphengine.models.decoder import DecoderWeights
from graphengine.models.factory import check_supported
from graphengine.models.hf_config import read_hf_config
from graphengine.models.loader import OpenedModel, check_weights, open_model
from graphengine.models.vocabulary import vocabulary_difference
from graphengine.speculative_config import SpeculativeConfig
from proposers import registry
from proposers.device import Architecture, DraftPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSite:
    """See `proposers.device.DraftSite`."""

    checkpoint: OpenedModel
    model: str | None
    dtype: torch.dtype
    max_draft_tokens: int
    max_model_len: int
    draft_sampling: str

    @property
    def target(self) -> ModelConfig:
        return self.checkpoint.config

    @property
    def target_path(self) -> Path:
        return self.checkpoint.location.path

    def read_architecture(self, raw: Mapping[str, Any]) -> ModelConfig:
        """Sizes from the contents of a config.json."""
        config = read_hf_config(raw, fallback_dtype=self.dtype)
        check_supported(config, self.dtype)
        return config

    def block_parameters(
        self, architecture: Architecture, *, input_size: int | None = None
    ) -> dict[str, torch.Tensor]:
        """One layer's parameters on the meta device, by their names within it."""
        assert isinstance(architecture, ModelConfig), f"{architecture!r} is of another engine"
        meta = torch.device("meta")
        weights = LayerWeights.allocate(architecture, self.dtype, meta, input_size=input_size)
        return weights.destinations(architecture)

    def open_decoder(self) -> OpenedDraftDecoder:
        """Open the draft's checkpoint as a decoder of the target's vocabulary."""
        assert self.model is not None, "no draft model was named"
        opened = open_model(self.model)
        check_supported(opened.config, self.dtype)
        difference = vocabulary_difference(self.checkpoint, opened)
        if difference is not None:
            raise ValueError(f"{difference}; a draft model must have the target's tokenizer")
        weights = DecoderWeights.allocate(opened.config, self.dtype, torch.device("meta"))
        check_weights(weights.destinations(opened.config), opened.source, config=opened.config)
        return OpenedDraftDecoder(opened, self.dtype, self.target.vocab_size)


def plan_draft(
    speculative: SpeculativeConfig,
    checkpoint: OpenedModel,
    *,
    dtype: torch.dtype,
    max_model_len: int,
) -> DraftPlan | None:
    """What the configured proposer needs of the engine; None where it carries no model.

    Raises:
        ValueError: its checkpoint is missing, malformed or not for this target.
    """
    site = EngineSite(
        checkpoint=checkpoint,
        model=speculative.model,
        dtype=dtype,
        max_draft_tokens=speculative.max_draft_tokens,
        max_model_len=max_model_len,
        draft_sampling=speculative.draft_sampling,
    )
    try:
        return registry.plan(speculative.method, dict(speculative.options), site)
    except ValueError as error:
        if speculative.model is None:
            raise
        raise ValueError(f"SpeculativeConfig.model={speculative.model!r}: {error}") from error
