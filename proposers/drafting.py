"""Drafting: one draft token out of a proposer's distribution, by the three kinds of draft sampling.

*Greedy* takes the likeliest token. *Coupled* takes the likeliest under the noise that will choose
the target's token at the same place (Gumbel-max), so that the two agree more often where tokens are
sampled. *Probabilistic* draws by noise of the draft's own and hands over what it was drawn from.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from proposers.base import FloatArray, RequestSampling, Runtime


@dataclass(frozen=True, slots=True)
class Choice:
    """A draft token and, where it was drawn, the distribution that it was drawn from."""

    token_id: int
    probs: npt.NDArray[np.float32] | None = None  # [vocab]


class DraftSampler:
    """Chooses draft tokens as the engine is configured to.

    Args:
        runtime: of the engine; says the kind and has the noise.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def choose(self, logits: FloatArray, request: RequestSampling, position: int) -> Choice:
        """The draft of a place.

        Args:
            logits: [vocab], the proposer's own; -inf for what it never drafts, no NaN, and at least
                one number.
            request: whose draft it is. At temperature 0 every kind is greedy, and a drawn draft has
                probability 1.
            position: index of the draft in the request, prompt included.
        """
        kind, temperature = self._runtime.draft_sampling, request.temperature
        if kind == "greedy" or (kind == "coupled" and temperature == 0):
            return Choice(int(np.argmax(logits)))
        if kind == "coupled":
            noise = self._runtime.gumbels(request, position, "target")
            return Choice(int(np.argmax(_scaled(logits, temperature) + noise)))
        probs = _distribution(logits, temperature)
        noise = self._runtime.gumbels(request, position, "draft")
        with np.errstate(divide="ignore"):
            logs = np.log(probs.astype(np.float64))
        return Choice(int(np.argmax(logs + noise)), probs)


def _distribution(logits: FloatArray, temperature: float) -> npt.NDArray[np.float32]:
    """What is handed over, rounded, is what the draft is drawn from: the same numbers."""
    if temperature == 0:
        probs = np.zeros(len(logits), dtype=np.float32)
        probs[np.argmax(logits)] = 1
        return probs
    weights = np.exp(_scaled(logits, temperature))
    rounded: npt.NDArray[np.float32] = (weights / weights.sum()).astype(np.float32)
    return rounded


def _scaled(logits: FloatArray, temperature: float) -> FloatArray:
    """Relative to the likeliest, so that no temperature overflows."""
    largest = logits.max()
    if np.isinf(largest):  # +inf: those tokens alone
        return np.where(logits == largest, 0.0, -np.inf)
    scaled: FloatArray = (logits - largest) / temperature
    return scaled
