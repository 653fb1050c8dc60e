"""Log-probabilities of emitted tokens, from the arrays of a step to what a user reads.

Knows the columns of the step's output. By the model's own logits, before any processor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token at a position: its log-probability, and its rank: how many are likelier, plus 1."""

    logprob: float
    rank: int


def read_logprobs(
    ids: npt.NDArray[Any], values: npt.NDArray[Any], rank: int, num_logprobs: int
) -> Mapping[int, Logprob]:
    """What one row gives: the chosen token, and the `num_logprobs` likeliest.

    Args:
        ids, values: [MAX_LOGPROBS + 1], column 0 the chosen token, the likeliest behind it.
        rank: of the chosen token.
    """
    found = {int(ids[0]): Logprob(float(values[0]), int(rank))}
    rank = 0
    for place in range(1, num_logprobs + 1):
        if ids[place] < 0:  # a vocabulary may have fewer
            break
        if place == 1 or values[place] < values[place - 1]:
            rank = place  # equally likely ones share it
        found.setdefault(int(ids[place]), Logprob(float(values[place]), rank))
    return found
