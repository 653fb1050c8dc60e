"""What a user gets back: request outputs and the engine's statistics.

Plain values, snapshots of the moment they were made. Owns the definitions of the published figures;
knows nothing of how they are counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from graphengine.request import FinishReason, Origin, RequestMetrics
from graphengine.sampling.logprobs import Logprob


@dataclass(frozen=True, slots=True, eq=False)
class AnswerLog:
    """Everything known of one request's answer so far.

    Only ever appended to, so that the outputs of all steps can share it, each seeing its beginning,
    and a step costs what it adds.
    """

    # the request's own lists, written by commit
    token_ids: Sequence[int]  # prompt first
    num_prompt_tokens: int
    token_origins: Sequence[Origin]  # one for each token after the prompt
    # one for each token after the prompt; None where the request does not ask for them
    token_logprobs: Sequence[Mapping[int, Logprob]] | None = None
    # one for each prompt token, None for the first; written by prefill, None where not asked for
    prompt_logprobs: Sequence[Mapping[int, Logprob] | None] | None = None
    # what each output added, written by the request's stream
    texts: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CompletionOutput:
    """One answer, as it stood after a step; equal where text, tokens and reason are.

    Attributes:
        index: which of the n answers to the prompt.
        finish_reason: `stop` (a stop id or string, or the model's own end), `length` (`max_tokens`
            or the context limit), `abort`; None while it is running.
        text, token_ids, token_origins, logprobs, cumulative_logprob: what there is of it, below.
    """

    index: int
    finish_reason: FinishReason | None  # None while running
    log: AnswerLog
    num_tokens: int  # of the log, how many tokens and texts this answer has
    num_texts: int

    @cached_property
    def text(self) -> str:
        """The answer decoded; "" where the checkpoint has no tokenizer."""
        return "".join(self.log.texts[: self.num_texts])

    @cached_property
    def token_ids(self) -> list[int]:
        """Emitted token ids `[num_tokens]`; one that stopped the request is the last of them."""
        start = self.log.num_prompt_tokens
        return list(self.log.token_ids[start : start + self.num_tokens])

    @cached_property
    def token_origins(self) -> list[Origin]:
        """Where each token came from, `[num_tokens]`."""
        return list(self.log.token_origins[: self.num_tokens])

    @cached_property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """By position `[num_tokens]`: the emitted token's and the likeliest ones', by token id.

        None where the request did not ask.
        """
        if self.log.token_logprobs is None:
            return None
        return [dict(one) for one in self.log.token_logprobs[: self.num_tokens]]

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the emitted tokens' log-probabilities; None where the request did not ask."""
        if self.logprobs is None:
            return None
        found = zip(self.logprobs, self.token_ids, strict=True)
        return sum(one[token].logprob for one, token in found)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CompletionOutput):
            return NotImplemented
        return self._value == other._value

    def __repr__(self) -> str:
        return (
            f"CompletionOutput(index={self.index}, text={self.text!r}, "
            f"token_ids={self.token_ids}, finish_reason={self.finish_reason!r})"
        )

    @property
    def _value(self) -> tuple[object, ...]:
        return self.index, self.finish_reason, self.text, self.token_ids, self.token_origins


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """The state of a request after a step; the last one has `finished` set.

    A step gives one for each answer that it adds to.

    Attributes:
        request_id: as it was given; `LLM.generate` makes one up.
        outputs: the n answers.
        finished: whether all of them have ended.
        index, new_text, num_new_tokens: the answer that this output adds to, and what it adds.
        metrics: counts and clock readings; prompt_token_ids, prompt_logprobs: below.
    """

    request_id: str
    outputs: list[CompletionOutput]  # the n answers
    finished: bool  # all of them
    index: int = 0  # of the answer that this output adds to
    new_text: str  # what it adds to the text
    num_new_tokens: int
    # Of the answer that this output adds to; the last output's are of all answers together.
    metrics: RequestMetrics

    @cached_property
    def prompt_token_ids(self) -> list[int]:
        """The prompt as token ids `[num_prompt_tokens]`."""
        log = self.outputs[0].log
        return list(log.token_ids[: log.num_prompt_tokens])

    @cached_property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """By prompt token `[num_prompt_tokens]`, None for the first, which nothing foretells: its
        log-probability and the likeliest ones', by token id.

        None where the request did not ask. Shorter where it was aborted before its prompt was read.
        """
        found = self.outputs[0].log.prompt_logprobs
        return None if found is None else [None if one is None else dict(one) for one in found]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """Counters since the engine started. Tokens cut off by a stop count as drafted alone."""

    num_steps: int = 0  # verify steps (replays of the table)
    num_drafts: int = 0  # request-steps that carried at least one draft
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_tokens: int = 0
    num_request_steps: int = 0  # requests summed over verify steps
    num_prefill_tokens: int = 0
    num_preemptions: int = 0
    accepted_per_position: tuple[
        int, ...
    ] = ()  # [max_draft_tokens]: drafts accepted at each position
    replays: Mapping[str, int] = field(default_factory=dict)  # by cell
    # Rows of replayed cells that carried no token: padding requests, and tails behind the drafts
    # of a request that has fewer than its cell.
    padding_rows: int = 0
    eager_fallbacks: Mapping[str, int] = field(default_factory=dict)  # by named reason
    compile_events: int = 0  # all, warm-up included
    compile_events_after_warmup: int = 0
    capture_seconds: Mapping[str, float] = field(default_factory=dict)  # by cell
    capture_bytes: Mapping[str, int] = field(default_factory=dict)  # by cell
    kv_blocks_used: int = 0
    kv_blocks_free: int = 0  # cached ones included
    kv_blocks_cached: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 0.0 where nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per request and verify step, bonus included; 0.0 before the first step."""
        return self.num_emitted_tokens / self.num_request_steps if self.num_request_steps else 0.0
