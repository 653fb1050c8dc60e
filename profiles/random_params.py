"""Random sampling parameters, all fields mixed; half of all requests are plainly greedy."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from graphengine.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class NoRepeats:
    """What a grammar might say: any token but the last two."""

    vocab_size: int

    def __call__(self, prompt: list[int], output: list[int]) -> npt.NDArray[np.int64]:
        return np.delete(np.arange(self.vocab_size), [*prompt, *output][-2:])


@dataclass(frozen=True, slots=True)
class Favour:
    """A logits processor: a token that follows from those before it gets `amount` more."""

    amount: float

    def __call__(self, prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[(len(prompt) + 7 * sum(output[-3:])) % len(logits)] += self.amount
        return logits


def random_params(
    draw: random.Random, vocab_size: int, most: int | None = None, *, has_text: bool = False
) -> SamplingParams:
    """What a request asks for, with a seed of its own.

    Args:
        most: tokens, at most; None: any number.
        has_text: whether it may have stop strings.
    """
    max_tokens = draw.choice((most, most, 1, 5, 20, 40))
    chosen: dict[str, Any] = {
        "max_tokens": max_tokens,
        "stop_token_ids": tuple(draw.sample(range(vocab_size), draw.choice((0, 0, 1, 5)))),
        "ignore_eos": draw.random() < 0.5,
        "seed": draw.getrandbits(64),
    }
    if draw.random() < 0.5:
        return SamplingParams(**chosen)
    fields: dict[str, Any] = {
        "temperature": draw.choice((0.0, 0.3, 0.7, 1.0, 1.0, 2.5)),
        "top_k": draw.choice((1, 3, 20, vocab_size, vocab_size + 5)),
        "top_p": draw.choice((0.05, 0.5, 0.9, 0.99)),
        "min_p": draw.choice((0.02, 0.3)),
        "repetition_penalty": draw.choice((0.8, 1.2, 2.0)),
        "frequency_penalty": draw.choice((-1.0, 0.5, 2.0)),
        "presence_penalty": draw.choice((-1.0, 0.5, 2.0)),
        "logit_bias": {draw.randrange(vocab_size): draw.uniform(-9, 9) for _ in range(5)},
        "allowed_token_ids": tuple(range(draw.randrange(3), vocab_size, draw.choice((1, 2, 5)))),
        "min_tokens": draw.randint(1, max_tokens or 30),
    }
    fields["logprobs"] = draw.choice((0, 3))
    fields["prompt_logprobs"] = draw.choice((0, 2))
    if vocab_size > 30:
        fields["allowed_tokens_fn"] = NoRepeats(vocab_size)
    if has_text:
        fields["bad_words"] = (" the", "is", "Once upon")
        fields["stop"] = (". ", "the ", draw.choice("abcdefghijklmnopqrstuvwxyz") + " ", "\n\n")
    chosen["temperature"] = draw.choice((0.0, 0.7, 1.0, 1.0))
    if vocab_size < 100:  # so few that all which are allowed might be stop ids
        del fields["min_tokens"]
    for name in draw.sample(sorted(fields), draw.choice((0, 1, 2, 3, len(fields)))):
        chosen[name] = fields[name]
    if chosen["temperature"] > 0 and draw.random() < 0.25:
        chosen["n"] = draw.choice((2, 3))
    return SamplingParams(**chosen)
