"""Admission: from what a caller asked for to a request that can be served, or a clear refusal.

Owns the checks that need the model's vocabulary. Queues nothing, so a refused request leaves no
trace; what depends on the pool and on other requests is checked by the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from graphengine.models.tokenizer import Tokenizer, check_unicode
from graphengine.request import Request
from graphengine.request_state import MAX_STOP_IDS
from graphengine.resolve import ResolvedConfig
from graphengine.sampling.params import SamplingParams


def make_requests(
    request_id: str,
    prompt: str | Sequence[int],
    params: SamplingParams,
    *,
    tokenizer: Tokenizer | None,
    resolved: ResolvedConfig,
    cache_salt: str | None = None,
) -> list[Request]:
    """Tokenise and check; one request for each answer that is asked for.

    Args:
        prompt: text, or token ids in [0, vocab_size).
        tokenizer: None where the checkpoint has none; text is refused then.
        cache_salt: see `Request`.

    Raises:
        ValueError: an argument of another kind, an empty prompt or salt, text without a tokenizer,
            an id outside the vocabulary, or too many stop ids.
    """
    if not isinstance(request_id, str):
        raise ValueError(f"request_id={request_id!r}: expected a string")
    if not isinstance(params, SamplingParams):
        raise ValueError(f"request {request_id!r}: params={params!r}: expected SamplingParams")
    token_ids = _token_ids(request_id, prompt, tokenizer)
    requests: list[Request] = []
    for choice in range(params.n):
        request = Request(
            request_id,
            token_ids,
            params,
            max_model_len=resolved.sizes.max_model_len,
            eos_token_ids=resolved.model.eos_token_ids,
            cache_salt=cache_salt,
            choice=choice,
        )
        if choice == 0:
            request.bad_words = _bad_words(request_id, params, tokenizer)
            _check(request, tokenizer, resolved.model.vocab_size)
            token_ids = request.prompt_token_ids
        else:
            request.bad_words = requests[0].bad_words
        requests.append(request)
    if params.logits_processors and not resolved.sizes.custom_logits:
        raise ValueError(
            f"request {request_id!r}: logits_processors={params.logits_processors!r}: the engine "
            "has captured no graphs for them; start it with logits_processors=True"
        )
    return requests


def _bad_words(
    request_id: str, params: SamplingParams, tokenizer: Tokenizer | None
) -> list[list[int]]:
    """The bad words as token ids: each as a text of its own, and behind a space."""
    if params.bad_words and tokenizer is None:
        raise ValueError(
            f"request {request_id!r}: bad_words={params.bad_words!r}: the checkpoint has no "
            "tokenizer, hence no words; give logit_bias or allowed_tokens_fn"
        )
    spellings: dict[tuple[int, ...], None] = {}
    for word in params.bad_texts:
        check_unicode(f"request {request_id!r}: bad_words={word!r}", word)
        for text in (word, f" {word.lstrip()}"):
            ids = tokenizer.encode_plain(text) if tokenizer is not None else []
            if ids:
                spellings[tuple(ids)] = None
    return [list(ids) for ids in spellings]


def _check(request: Request, tokenizer: Tokenizer | None, vocab_size: int) -> None:
    """What only tokenizer and vocabulary can tell to be wrong."""
    params, request_id = request.params, request.request_id
    if params.stop and tokenizer is None:
        raise ValueError(
            f"request {request_id!r}: stop={params.stop!r}: the checkpoint has no tokenizer, hence "
            "no text; give stop_token_ids"
        )
    _check_ids(request_id, "prompt token", request.prompt_token_ids, vocab_size)
    _check_ids(request_id, "stop token", list(request.stop_token_ids), vocab_size)
    _check_ids(
        request_id, "bad word token", [i for ids in request.bad_words for i in ids], vocab_size
    )
    _check_ids(request_id, "logit_bias", [token for token, _ in params.bias], vocab_size)
    _check_allowed(request, vocab_size)
    if len(request.stop_token_ids) > MAX_STOP_IDS:
        raise ValueError(
            f"request {request_id!r}: {len(request.stop_token_ids)} stop token ids, the model's "
            f"own included; at most {MAX_STOP_IDS} are allowed"
        )


def _token_ids(
    request_id: str, prompt: str | Sequence[int], tokenizer: Tokenizer | None
) -> Sequence[int]:
    if not isinstance(prompt, str):
        # Iterating over these gives integers too, but none that was meant as a token id in order.
        unordered = isinstance(prompt, bytes | bytearray | Mapping | Set)
        if unordered or not isinstance(prompt, Iterable):
            raise ValueError(
                f"request {request_id!r}: the prompt is of type {type(prompt).__name__}; give text "
                "or a list of token ids"
            )
        return prompt
    if tokenizer is None:
        raise ValueError(
            f"request {request_id!r}: the checkpoint has no tokenizer; give the prompt as token ids"
        )
    return tokenizer.encode(prompt)


def _check_ids(request_id: str, what: str, ids: Sequence[int], vocab_size: int) -> None:
    largest = max(ids, default=0)
    if largest >= vocab_size:
        raise ValueError(
            f"request {request_id!r}: {what} id {largest} is outside the vocabulary of {vocab_size}"
        )


def _check_allowed(request: Request, vocab_size: int) -> None:
    allowed = request.params.allowed_ids
    _check_ids(request.request_id, "allowed token", allowed or (), vocab_size)
    if not request.params.min_tokens:
        return
    if request.stop_token_ids.issuperset(range(vocab_size) if allowed is None else allowed):
        raise ValueError(
            f"request {request.request_id!r}: min_tokens={request.params.min_tokens}: every token "
            "that allowed_token_ids leaves is a stop id, so nothing can be emitted before"
        )
