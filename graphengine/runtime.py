"""EngineRuntime: what a proposer is told about its engine (`proposers.base.Runtime`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from graphengine.resolve import ResolvedConfig
from graphengine.sampling import noise
from proposers.base import DraftSampling, RequestSampling


@dataclass(frozen=True, slots=True)
class EngineRuntime:
    """See the module docstring."""

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_draft_tokens: int
    device: torch.device
    draft_sampling: DraftSampling = "greedy"

    @classmethod
    def of(cls, resolved: ResolvedConfig) -> EngineRuntime:
        """Of an engine with speculation."""
        sizes = resolved.sizes
        assert resolved.speculative is not None, "nobody drafts"
        return cls(
            vocab_size=resolved.model.vocab_size,
            max_model_len=sizes.max_model_len,
            max_num_seqs=sizes.max_num_seqs,
            max_draft_tokens=sizes.max_draft_tokens,
            device=resolved.device,
            draft_sampling=resolved.speculative.draft_sampling,
        )

    def gumbels(
        self, request: RequestSampling, position: int, stream: Literal["target", "draft"]
    ) -> npt.NDArray[np.float64]:
        """Gumbel numbers [vocab_size] of a place, as the captured sampler has them."""
        return noise.gumbels(
            request.seed,
            position=position,
            stream=noise.TARGET if stream == "target" else noise.DRAFT,
            choice=request.choice,
            count=self.vocab_size,
        )
