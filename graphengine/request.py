"""Request: one prompt's life from arrival to its last token.

Owns the tokens, the status, the stop ids and the limit of one request, and says when it is done.
Scheduler and KV manager write its scheduling fields (marked below); nobody else does. Knows nothing
of tensors, batches or blocks' contents.
"""

from __future__ import annotations

import enum
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from graphengine.kv.block_table import BlockTable
from graphengine.sampling.logprobs import Logprob
from graphengine.sampling.params import SamplingParams
from proposers.base import RequestSampling

FinishReason = Literal["stop", "length", "abort"]

# Where an emitted token came from: a confirmed draft, the target's token at the first mismatch, or
# the target's token after a block without a mismatch (plain decoding included).
Origin = Literal["accepted", "recovered", "bonus"]


class RequestStatus(enum.Enum):
    """Where a request stands. Only PREFILL and DECODE hold a row and blocks."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(slots=True, kw_only=True)
class RequestMetrics:
    """Counts and clock readings of one request; handed out with its output.

    Only committed tokens count: a draft that was accepted and then cut off by a stop is not in
    `num_accepted_tokens`. Times are seconds on the engine's clock, which writes them.
    """

    num_steps: int = 0  # verify steps committed, with or without drafts
    num_drafts: int = 0  # of those, the steps that carried at least one draft token
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # <= num_draft_tokens
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache at first admission
    num_preemptions: int = 0
    arrival_time: float | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None

    @classmethod
    def together(cls, parts: Sequence[RequestMetrics]) -> RequestMetrics:
        """Of several answers to one prompt: counts are summed; the first start, the last finish.

        `finished_time` is None until all have one.
        """
        found: dict[str, Any] = {}
        for field in fields(cls):
            values = [getattr(part, field.name) for part in parts]
            known = [value for value in values if value is not None]
            if field.name == "finished_time":
                found[field.name] = max(known) if len(known) == len(values) else None
            elif field.name.endswith("_time"):
                found[field.name] = min(known, default=None)
            else:
                found[field.name] = sum(values)
        return cls(**found)


def answer_id(request_id: str, choice: int) -> str:
    """What one of the n answers to a request is called inside the engine, and by proposers."""
    return f"{request_id}#{choice}" if choice else request_id


class Request:
    """A prompt, the tokens emitted for it, and its place in the engine.

    Where several answers are asked for, each is a request of its own in here.

    Args:
        request_id: unique among unfinished requests.
        prompt_token_ids: non-empty, each id >= 0.
        params: what was asked for.
        max_model_len: context limit in tokens, prompt and output together.
        eos_token_ids: the model's own stop ids; left out where `params.ignore_eos`.
        cache_salt: whose KV it may share, not empty; None: that of other requests without one.
        choice: which of the n answers to its prompt this is. `asked_id` is then the id as it was
            given, and `request_id` one of its own.

    Raises:
        ValueError: empty prompt or salt, or a negative id.
    """

    __slots__ = (
        "admission",
        "arrival",
        "asked_id",
        "bad_words",
        "block_digests",
        "block_table",
        "cache_salt",
        "choice",
        "draft_kv_ahead",
        "draft_kv_len",
        "draft_limit",
        "finish_reason",
        "kv_len",
        "limit",
        "metrics",
        "num_in_flight",
        "num_prompt_tokens",
        "num_reserved_rows",
        "params",
        "prompt_logprobs",
        "prompt_token_ids",
        "request_id",
        "row",
        "seed",
        "status",
        "stop_length",
        "stop_token_ids",
        "token_ids",
        "token_logprobs",
        "token_origins",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        max_model_len: int,
        eos_token_ids: Iterable[int] = (),
        cache_salt: str | None = None,
        choice: int = 0,
    ) -> None:
        prompt = _checked_prompt(request_id, prompt_token_ids)
        self.asked_id = request_id
        self.request_id = answer_id(request_id, choice)
        self.choice = choice
        self.cache_salt = _checked_salt(request_id, cache_salt)
        self.prompt_token_ids = prompt
        self.params = params
        self.seed = params.seed or 0  # the engine draws one where there is none
        self.bad_words: Sequence[Sequence[int]] = ()  # as token ids; written by admission
        self.num_prompt_tokens = len(prompt)
        self.stop_token_ids = frozenset(params.stop_ids) | (
            frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        )
        budget = max_model_len if params.max_tokens is None else len(prompt) + params.max_tokens
        self.limit = min(max_model_len, budget)
        self.metrics = RequestMetrics()

        # Prompt, then output; verified tokens alone. Only commit appends, and one origin each.
        self.token_ids: list[int] = list(prompt)
        self.token_origins: list[Origin] = []
        asks = params.logprobs is not None
        self.token_logprobs: list[Mapping[int, Logprob]] | None = [] if asks else None

        wants = params.prompt_logprobs is not None and choice == 0
        # By prompt token, nothing for the first; grows with prefill. None where nobody asks.
        self.prompt_logprobs: list[Mapping[int, Logprob] | None] | None = [None] if wants else None

        # Number of tokens with which a stop string is complete; written before their commit.
        self.stop_length: int | None = None

        # Written by the scheduler. `arrival` orders requests and is given once; `admission` is new
        # each time that the request gets a row, and no two ever have the same.
        self.arrival: int | None = None
        self.admission: int | None = None
        self.row: int | None = None  # persistent state row, while PREFILL or DECODE
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        # By the flights: tokens that may come, and slots of draft KV beyond them (negative: none).
        self.num_in_flight = self.draft_kv_ahead = 0
        self.draft_limit: int | None = None  # by the draft-length policy; None: not yet
        # Written by the KV manager. Rows [kv_len, kv_len + num_reserved_rows) may be written by the
        # current step and those under way; between steps nothing else is reserved.
        self.kv_len = 0
        self.draft_kv_len = 0  # leading slots whose draft KV is valid, <= kv_len
        self.num_reserved_rows = 0
        self.block_table = BlockTable()
        # Chained digest of each full block of token_ids so far; a pure function of the tokens and
        # the salt, so it outlives preemption.
        self.block_digests: list[bytes] = []

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """Emitted tokens, a new list."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_decode_ready(self) -> bool:
        """All known tokens but the last are in the KV cache; the last enters by verify."""
        return self.kv_len == len(self.token_ids) - 1

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens still to be prefilled before the request is decode-ready."""
        return len(self.token_ids) - 1 - self.kv_len

    @property
    def needs_whole_prompt(self) -> bool:
        """Its prompt must be computed row by row: there is more to tell of it."""
        known = self.prompt_logprobs
        return known is not None and len(known) < self.num_prompt_tokens

    @property
    def max_draft_tokens(self) -> int:
        """Drafts that leave the bonus token its place under the limit, within its own; >= 0."""
        room = self.draft_room
        return room if self.draft_limit is None else min(room, self.draft_limit)

    @property
    def draft_room(self) -> int:
        """Drafts that leave the bonus token its place under the limit; >= 0."""
        return max(0, self.limit - len(self.token_ids) - self.num_in_flight - 1)

    @property
    def expected_draft_kv_len(self) -> int:
        """Leading slots whose draft KV is valid if all drafts under way are accepted."""
        if not self.num_in_flight:
            return self.draft_kv_len
        return max(self.draft_kv_len, len(self.token_ids) + self.draft_kv_ahead)

    @property
    def may_step(self) -> bool:
        """Whether there is room for a token, whatever the steps under way bring."""
        return len(self.token_ids) + self.num_in_flight < self.limit

    @property
    def sampling(self) -> RequestSampling:
        """How its tokens are chosen, as far as a proposer may know."""
        return RequestSampling(
            temperature=self.params.temperature, seed=self.seed, choice=self.choice
        )

    def check_finished(self) -> FinishReason | None:
        """Reason to finish, judged by the last emitted token; a stop wins over the limit."""
        if self.num_output_tokens == 0:
            return None
        if self.token_ids[-1] in self.stop_token_ids or self.num_tokens == self.stop_length:
            return "stop"
        return "length" if len(self.token_ids) >= self.limit else None

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, num_tokens={self.num_tokens}, "
            f"kv_len={self.kv_len}, limit={self.limit}, row={self.row})"
        )


def _checked_salt(request_id: str, cache_salt: str | None) -> str | None:
    if cache_salt is not None and not (isinstance(cache_salt, str) and cache_salt):
        raise ValueError(
            f"request {request_id!r}: cache_salt={cache_salt!r}: expected a string "
            "that is not empty, or None"
        )
    return cache_salt


def _checked_prompt(request_id: str, token_ids: Iterable[object]) -> tuple[int, ...]:
    """The ids as Python integers; anything that is not an integer >= 0 is refused by index."""
    checked = []
    for index, token in enumerate(token_ids):
        value = int(token) if isinstance(token, numbers.Integral) else None
        if value is None or value < 0 or isinstance(token, bool):
            why = "negative" if value is not None and value < 0 else "not an integer"
            raise ValueError(
                f"request {request_id!r}: prompt token id {token!r} is {why} (index {index}); "
                f"ids are integers >= 0"
            )
        checked.append(value)
    if not checked:
        raise ValueError(f"request {request_id!r}: the prompt is empty; give at least 1 token")
    return tuple(checked)
