"""SamplingParams: what one request asks of decoding.

Owns the fields, their defaults and their validation. Knows nothing of tokenizers, vocabularies or
the engine: ids are checked against the vocabulary where it is known, and the context limit is
applied by the request.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from graphengine.sampling.hooks import AllowedTokens, LogitsProcessor, takes

DEFAULT_MAX_TOKENS = 16
MAX_SEED: Final = (1 << 64) - 1
MAX_LOGPROBS: Final = 20
MAX_CHOICES: Final = 128
MAX_LOGIT_BIAS: Final = 256  # tokens with a bias, of one request


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Immutable decoding request.

    Processors act on every verified row in this order: bias, penalties, masks (allowed tokens,
    min_tokens), and, where temperature > 0, temperature, top-k, top-p, min-p.

    Args:
        max_tokens: largest number of tokens to emit, >= 1. The default, 16, is that of vLLM and of
            the OpenAI completions API. `None` means up to the context limit (`max_model_len`).
        min_tokens: smallest number of tokens to emit before a stop id may come, 0 to `max_tokens`:
            until then stop ids, the model's own included, have no probability.
        temperature: 0, or 2**-126 to 2**127. 0 is greedy: the likeliest token, ties to the lowest
            id.
        top_k: only this many most likely tokens, and those equal to the last of them; 0 or -1: all.
        top_p: only the most likely tokens that together have this probability, in (0, 1]; equal
            ones by lowest id (Holtzman et al. 2019, nucleus sampling).
        min_p: only tokens at least this times as likely as the most likely one, in [0, 1].
        repetition_penalty: 2**-30 to 2**30; logits of tokens in prompt or output are divided by it
            where positive and multiplied where negative (Keskar et al. 2019).
        frequency_penalty: -2 to 2; times a token's count in the output, taken from its logit.
        presence_penalty: -2 to 2; taken from the logits of tokens in the output.
        logit_bias: token id to a number in [-100, 100] that is added to its logit; at most 256.
            Stored as a tuple of pairs.
        allowed_token_ids: nothing else may come; None: everything may. Not empty.
        bad_words: texts, not empty, that the output must not spell in the tokenizer's own tokens,
            alone or behind a space: the last token of one may not come where all before it have.
        allowed_tokens_fn: a function of the prompt's ids and the output's so far to the ids that
            may come next, at least one (a grammar, say). It must depend on nothing but these. It is
            also asked behind drafts, guesses that may never come: what it raises there only ends
            the guessing, and what it raises otherwise comes out of the step.
        logits_processors: functions of the prompt's ids, the output's so far and the model's logits
            [vocab] fp32, which they may change, to logits of the same form. They come before all
            other processors, are run on the host between two graphs, and need an engine with
            `logits_processors=True`. For them holds what holds for `allowed_tokens_fn`.
        seed: 0 to 2**64 - 1. The same seed gives the same tokens, whatever shares the batch (with
            `verification="rejection"` only where the same drafts come). None: the engine draws one.
        n: answers to the prompt, 1 to 128; more than one needs a temperature. Each has noise of its
            own, and the first is the answer that n = 1 gives.
        stop_token_ids: ids that end the request, each >= 0; the stop token itself is emitted.
            Any iterable of integers is accepted and stored as a tuple. None, here and in the other
            fields that hold several, is none, and a single text or function is one of them.
        stop: strings, not empty, that end the request: at the token that completes one, once
            `min_tokens` are out. The text ends before it, the ids with that token.
        include_stop_str_in_output: the text ends behind the stop string.
        ignore_eos: go on past the model's own end-of-sequence ids. `stop_token_ids` still stop.
        logprobs: give log-probabilities of every emitted token and of this many likeliest, 0 to
            20, by the model's own logits, before any processor; None: none.
        prompt_logprobs: the same for every prompt token but the first; the prompt is then read
            whole, whatever of it is cached.
        skip_special_tokens: leave special tokens out of the decoded text (never out of the ids).

    Raises:
        ValueError: a field has a value that is not allowed; the message names field, value and
            what is allowed.
    """

    max_tokens: int | None = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] | None = ()
    allowed_token_ids: Iterable[int] | None = None
    bad_words: str | Iterable[str] | None = ()
    allowed_tokens_fn: AllowedTokens | None = None
    logits_processors: LogitsProcessor | Iterable[LogitsProcessor] | None = ()
    seed: int | None = None
    n: int = 1
    stop_token_ids: Iterable[int] | None = ()
    stop: str | Iterable[str] | None = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        checked: dict[str, object] = {
            "min_tokens": _integer("min_tokens", self.min_tokens, 0, _MOST),
            "n": _integer("n", self.n, 1, MAX_CHOICES),
            "top_k": max(0, _integer("top_k", self.top_k, -1, _MOST)),
            "logit_bias": _logit_bias(self.logit_bias),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "stop": _strings("stop", self.stop),
            "bad_words": _strings("bad_words", self.bad_words),
            "logits_processors": _processors(self.logits_processors),
        }
        for name, lowest, highest, allowed in _RANGES:
            value = getattr(self, name)
            checked[name] = _number(name, value, lowest, highest, allowed)
        if self.max_tokens is not None:
            checked["max_tokens"] = _integer("max_tokens", self.max_tokens, 1)
        if self.seed is not None:
            checked["seed"] = _integer("seed", self.seed, 0, MAX_SEED)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                checked[name] = _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.allowed_token_ids is not None:
            ids = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not ids:
                raise _refusal("allowed_token_ids", ids, "at least one token id, or None")
            checked["allowed_token_ids"] = ids
        hook = self.allowed_tokens_fn
        if hook is not None and not (callable(hook) and takes(hook, 2)):
            raise _refusal("allowed_tokens_fn", hook, "a function of (prompt, output), or None")
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise _refusal(name, value, "True or False")
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            allowed = f"an integer from 0 to max_tokens={self.max_tokens}"
            raise _refusal("min_tokens", self.min_tokens, allowed)
        if self.n > 1 and self.temperature == 0:
            raise _refusal("n", self.n, "1 where temperature is 0: all answers would be the same")

    @property
    def bias(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as it is stored: pairs, by ascending id. So with the others below: the
        fields take more than they keep.
        """
        return cast(tuple[tuple[int, float], ...], self.logit_bias)

    @property
    def allowed_ids(self) -> tuple[int, ...] | None:
        return cast(tuple[int, ...] | None, self.allowed_token_ids)

    @property
    def bad_texts(self) -> tuple[str, ...]:
        return cast(tuple[str, ...], self.bad_words)

    @property
    def processors(self) -> tuple[LogitsProcessor, ...]:
        return cast(tuple[LogitsProcessor, ...], self.logits_processors)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return cast(tuple[int, ...], self.stop_token_ids)

    @property
    def stop_texts(self) -> tuple[str, ...]:
        return cast(tuple[str, ...], self.stop)

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)

    @property
    def is_plain_greedy(self) -> bool:
        """The most likely token as the model has it: no processor can change the choice."""
        changed = self.has_penalties or self.logit_bias or self.logits_processors
        return not (self.temperature or changed or self.has_mask)

    @property
    def has_mask(self) -> bool:
        """Some token may not come, now or at another time."""
        return self.has_prefix_mask or self.allowed_token_ids is not None or self.min_tokens > 0

    @property
    def needs_tokens(self) -> bool:
        """Whether a step's inputs depend on the tokens before it: on what they are, or how many."""
        return self.has_prefix_mask or bool(self.logits_processors) or self.min_tokens > 0

    @property
    def has_prefix_mask(self) -> bool:
        """What may come depends on the tokens before it."""
        return bool(self.bad_words) or self.allowed_tokens_fn is not None


_SMALLEST = 2.0**-126  # of normal float32 numbers, in which the kernels compute
_LARGEST = 2.0**127
_MOST = (1 << 31) - 1  # of the integers that kernels read
# Name, lowest and highest number, and how to say that. Temperature has a hole above 0: see _number.
_RANGES: Final = (
    ("temperature", 0.0, _LARGEST, "0 (greedy) or a number from 2**-126 to 2**127"),
    ("top_p", _SMALLEST, 1.0, "a number above 0, up to 1"),
    ("min_p", 0.0, 1.0, "a number from 0 to 1"),
    ("repetition_penalty", 2.0**-30, 2.0**30, "a number from 2**-30 to 2**30"),
    ("frequency_penalty", -2.0, 2.0, "a number from -2 to 2"),
    ("presence_penalty", -2.0, 2.0, "a number from -2 to 2"),
)


def _refusal(name: str, value: object, allowed: str) -> ValueError:
    return ValueError(f"SamplingParams.{name}={value!r:.200}: expected {allowed}")


def listed(value: Any) -> list[Any] | None:
    """What it gives when iterated; None where it cannot be, as an array of no dimension cannot."""
    try:
        return list(value)
    except TypeError:
        return None


def _integer(name: str, value: Any, minimum: int, maximum: int | None = None) -> int:
    # bool is an Integral in Python, and max_tokens=True is a mistake rather than 1.
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or value < minimum or (maximum is not None and value > maximum):
        most = f" and <= {maximum}" if maximum is not None else ""
        none = {"max_tokens": " or None (up to the context limit)"}
        none |= dict.fromkeys(("seed", "logprobs", "prompt_logprobs"), " or None")
        raise _refusal(name, value, f"an integer >= {minimum}{most}{none.get(name, '')}")
    return int(value)


def _number(name: str, value: Any, lowest: float, highest: float, allowed: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _refusal(name, value, allowed)
    try:
        number = float(value)
    except OverflowError as error:  # an integer beyond all floats
        raise _refusal(name, value, allowed) from error
    subnormal = name == "temperature" and 0 < number < _SMALLEST
    if math.isnan(number) or not lowest <= number <= highest or subnormal:
        raise _refusal(name, value, allowed)
    return number + 0.0  # -0.0 is 0.0


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = None if isinstance(value, str | bytes) else listed(value)
    if ids is None:
        raise _refusal(name, value, "an iterable of token ids >= 0")
    return tuple(_integer(name, item, 0) for item in ids)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else [] if value is None else listed(value)
    if strings is None or not all(isinstance(item, str) and item for item in strings):
        raise _refusal(name, value, "a text or a list of texts, none of them empty")
    return tuple(strings)


def _processors(value: Any) -> tuple[LogitsProcessor, ...]:
    kept = [value] if callable(value) else [] if value is None else listed(value)
    if kept is not None and all(callable(one) and takes(one, 3) for one in kept):
        return tuple(kept)
    allowed = "a function of (prompt, output, logits), or a list of them"
    raise _refusal("logits_processors", value, allowed)


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """Pairs of a mapping (or of pairs, as they are stored), by ascending id."""
    if value is None:
        return ()
    pairs = listed(value.items() if isinstance(value, Mapping) else value)
    allowed = "a mapping of token ids to numbers from -100 to 100"
    if pairs is None or isinstance(value, str | bytes):
        raise _refusal("logit_bias", value, allowed)
    bias: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise _refusal("logit_bias", value, allowed)
        token = _integer("logit_bias", pair[0], 0)
        bias[token] = _number("logit_bias", pair[1], -100.0, 100.0, allowed)
    if len(bias) > MAX_LOGIT_BIAS:
        raise _refusal("logit_bias", value, f"at most {MAX_LOGIT_BIAS} tokens")
    return tuple(sorted(bias.items()))
