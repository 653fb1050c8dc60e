"""What drafts in the cells of `profiles.rejection`: distributions good, odd and hostile.

Each is a function from a history to a draft's logits, drawn from by `mock-drawn`, the scripted
proposer, as any proposer with a distribution draws. Two more break the rules on purpose, for a test
that must notice: `reused-noise` draws by the noise that the residual uses too, `other-q` hands over
another distribution than it has drawn from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from graphengine.runtime import EngineRuntime
from graphengine.sampling import noise
from graphengine.sampling.params import SamplingParams
from graphengine.speculative_config import SpeculativeConfig
from profiles.target_law import Target
from profiles.tiny_drafts import write_draft
from proposers.base import Draft, ProposeInputs, RequestSampling, TokenArray
from proposers.mock_drawn import DrawnProposer, Logits

NUM_DRAFTS = 3
MAX_MODEL_LEN = 64
MAX_NUM_SEQS = 16
MODEL_DRAFTS = ("draft_model", "eagle", "mtp")  # proposers with weights of their own
FloatArray = npt.NDArray[np.float64]
# Decimal exponents of q by the distance from the last token: down to float32's denormals, and below
# them to nothing.
_EXPONENTS = (0, -1, -2, -3, -4, -5, -6, -8, -10, -20, -30, -37, -38.5, -41, -44, -46)


def speculation(
    drafts: str, target: Target, params: SamplingParams, model: str | Path
) -> SpeculativeConfig:
    """Configuration of a cell, from which the engine makes its proposer, if it is a fair one.

    Args:
        model: the target's checkpoint; one that a draft may be written beside where it is a folder.
    """
    if drafts in MODEL_DRAFTS:
        folder = Path(model) / drafts
        folder.mkdir(exist_ok=True)
        return SpeculativeConfig(
            drafts,
            model=write_draft(drafts, folder, Path(model)),
            max_draft_tokens=NUM_DRAFTS,
            verification="rejection",
            draft_sampling="probabilistic",
            self_check="off",
            adaptive=False,
        )
    if drafts == "ngram":
        return SpeculativeConfig(
            "ngram", max_draft_tokens=NUM_DRAFTS, verification="rejection", adaptive=False
        )
    return SpeculativeConfig(
        "mock-drawn",
        max_draft_tokens=NUM_DRAFTS,
        adaptive=False,
        verification="rejection",
        draft_sampling="greedy" if drafts == "greedy" else "probabilistic",
        logits=draft_logits(drafts, target, params),
    )


def draft_logits(drafts: str, target: Target, params: SamplingParams) -> Logits:
    """What a cell draws its drafts by."""
    vocab_size = len(target.logits([0]))
    makers: dict[str, Callable[[], Logits]] = {
        "greedy": lambda: _related(target),
        "related": lambda: _related(target),
        "other-q": lambda: _related(target),
        "same": lambda: target.logits,
        "disjoint": lambda: _disjoint(vocab_size, params),
        "one-hot": lambda: _one_hot(_related(target)),
        "tiny": lambda: _tiny(vocab_size, params.temperature),
        "removed": lambda: _removed(target, params),
        "inverse": lambda: _inverse(target),
        "reused-noise": lambda: _inverse(target),
    }
    return makers[drafts]()


def biased_proposer(drafts: str, target: Target, params: SamplingParams) -> DrawnProposer | None:
    """The proposer of a cell that breaks the rules; None: a fair cell."""
    fields: dict[str, Any] = {
        "vocab_size": len(target.logits([0])),
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_draft_tokens": NUM_DRAFTS,
        "device": torch.device("cpu"),
        "draft_sampling": "probabilistic",
    }
    if drafts == "reused-noise":
        return DrawnProposer(ReusedNoise(**fields), draft_logits(drafts, target, params))
    if drafts == "other-q":
        return OtherProbs(EngineRuntime(**fields), draft_logits(drafts, target, params))
    return None


def _related(target: Target) -> Logits:
    """The target's, flattened, with fixed noise of the last token: often right, always off."""
    vocab_size = len(target.logits([0]))
    off = np.random.default_rng(0).normal(size=(vocab_size, vocab_size))

    def logits(history: TokenArray) -> FloatArray:
        found: FloatArray = 0.6 * target.logits(history) + 0.8 * off[history[-1]]
        return found

    return logits


def _inverse(target: Target) -> Logits:
    """The likelier a token is, the less it is drafted: most drafts are rejected."""
    return lambda history: -target.logits(history)


def _disjoint(vocab_size: int, params: SamplingParams) -> Logits:
    """Nothing but what may not come."""
    assert params.allowed_token_ids is not None, "a cell in which something may not come"
    fixed = np.zeros(vocab_size)
    fixed[list(params.allowed_token_ids)] = -np.inf
    return lambda history: fixed


def _one_hot(other: Logits) -> Logits:
    """All on the likeliest of another: certain, and handed over as a distribution."""

    def logits(history: TokenArray) -> FloatArray:
        found = other(history)
        return np.where(np.arange(len(found)) == found.argmax(), 0.0, -np.inf)

    return logits


def _tiny(vocab_size: int, temperature: float) -> Logits:
    """Powers of ten, whatever the temperature."""
    scaled = np.resize(_EXPONENTS, vocab_size) * math.log(10) * temperature
    return lambda history: np.roll(scaled, int(history[-1]) + 1)


def _removed(target: Target, params: SamplingParams) -> Logits:
    """The target's where top-p leaves nothing, and only there."""

    def logits(history: TokenArray) -> FloatArray:
        kept = target.probs((), history.tolist(), params) > 0
        assert not kept.all(), f"top-p removes nothing after {history.tolist()}"
        return np.where(kept, -np.inf, target.logits(history))

    return logits


@dataclass(frozen=True, slots=True)
class ReusedNoise(EngineRuntime):
    """BIASED: the noise that draws a draft would choose the token in its place, too."""

    def gumbels(
        self, request: RequestSampling, position: int, stream: Literal["target", "draft"]
    ) -> FloatArray:
        assert stream == "draft", stream
        return noise.gumbels(
            request.seed,
            position=position,
            stream=noise.RESIDUAL,
            choice=request.choice,
            count=self.vocab_size,
        )


class OtherProbs(DrawnProposer):
    """BIASED: hands over a flatter distribution than its drafts were drawn from."""

    def propose(self, inputs: ProposeInputs) -> Draft:
        draft = super().propose(inputs)
        assert draft.probs is not None, "drawn drafts"
        flat = draft.probs.sqrt()
        return replace(draft, probs=flat / flat.sum(dim=-1, keepdim=True).clamp_min(1e-30))
