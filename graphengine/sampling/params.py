"""SamplingParams: what one request asks of decoding.

Owns the fields, their defaults and their validation. Knows nothing of tokenizers, vocabularies or
the engine: ids are checked against the vocabulary where it is known, and the context limit is
applied by the request. Greedy decoding is all that is served, so it is all that can be asked for.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Immutable decoding request.

    Args:
        max_tokens: largest number of tokens to emit, >= 1. The default, 16, is that of vLLM and of
            the OpenAI completions API. `None` means up to the context limit (`max_model_len`).
        temperature: only 0 (greedy: the most likely token, ties to the lowest id) is served.
        stop_token_ids: ids that end the request, each >= 0; the stop token itself is emitted.
            Any iterable of integers is accepted and stored as a tuple.
        ignore_eos: go on past the model's own end-of-sequence ids. `stop_token_ids` still stop.
        skip_special_tokens: leave special tokens out of the decoded text (never out of the ids).

    Raises:
        ValueError: a field has a value that is not allowed; the message names field, value and
            what is allowed.
    """

    max_tokens: int | None = DEFAULT_MAX_TOKENS
    temperature: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            object.__setattr__(self, "max_tokens", _integer("max_tokens", self.max_tokens, 1))
        object.__setattr__(self, "temperature", _greedy_temperature(self.temperature))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        for name in ("ignore_eos", "skip_special_tokens"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise _refusal(name, value, "True or False")


def _refusal(name: str, value: object, allowed: str) -> ValueError:
    return ValueError(f"SamplingParams.{name}={value!r}: expected {allowed}")


def _integer(name: str, value: Any, minimum: int) -> int:
    # bool is an Integral in Python, and max_tokens=True is a mistake rather than 1.
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < minimum:
        none = " or None (up to the context limit)" if name == "max_tokens" else ""
        raise _refusal(name, value, f"an integer >= {minimum}{none}")
    return int(value)


def _greedy_temperature(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _refusal("temperature", value, "the number 0 (greedy)")
    number = float(value)
    if number != 0.0:
        known = math.isfinite(number) and number > 0.0
        why = " (sampling is not served yet)" if known else ""
        raise _refusal("temperature", value, f"0, greedy decoding{why}")
    return 0.0


def _token_ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise _refusal("stop_token_ids", value, "a list or tuple of token ids >= 0")
    return tuple(_integer("stop_token_ids", item, 0) for item in value)
