"""What a user gets back: request outputs and the engine's statistics.

Plain values, snapshots of the moment they were made. Owns the definitions of the published figures;
knows nothing of how they are counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from graphengine.request import FinishReason, RequestMetrics

# Where an emitted token came from: a confirmed draft, the target's token at the first mismatch, or
# the target's token after a block without a mismatch (plain decoding included).
Origin = Literal["accepted", "recovered", "bonus"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOutput:
    """One answer."""

    index: int
    text: str  # "" where the checkpoint has no tokenizer
    token_ids: list[int]
    token_origins: list[Origin]  # one a token
    finish_reason: FinishReason | None  # None while running


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """The state of a request after a step; the last one has `finished` set."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    new_text: str  # what this step added to the text
    num_new_tokens: int
    metrics: RequestMetrics


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
