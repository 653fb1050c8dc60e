"""One measured run: a batch of requests through an engine, its decode rate and its counters.

Owns what is measured of an engine, ours or another, and how ours drafts meanwhile. What counts as
decoding is `DecodeTimer`'s to say.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Self

from graphengine.decode_timer import DecodeTimer
from graphengine.draft_length.policy import FixedLength
from graphengine.engine import Engine
from graphengine.outputs import RequestOutput
from graphengine.request import Origin
from graphengine.sampling.params import SamplingParams

OWN: Final = "adaptive"  # in place of a draft length: whatever the engine's policy chooses
DraftLengthChoice = int | str  # a fixed length, or OWN


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What any engine gave to a batch of prompts, in order."""

    token_ids: list[list[int]]
    decode_seconds: float
    decode_tokens: int
    first_token_seconds: float  # from the request until the last prompt has its first token

    @property
    def rate(self) -> float:
        """Decode tokens a second; 0.0 where the window is empty."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @classmethod
    def of(cls, token_ids: list[list[int]], timer: DecodeTimer) -> Self:
        """The figures of a timer that was started with the request."""
        seconds, num_tokens = timer.window
        assert timer.start is not None, "a prompt got no token"
        return cls(
            token_ids=token_ids,
            decode_seconds=seconds,
            decode_tokens=num_tokens,
            first_token_seconds=timer.start,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRun(Answer):
    """What a batch gave in our engine."""

    token_origins: list[list[Origin]]
    num_steps: int  # summed over requests
    num_draft_tokens: int
    num_accepted_tokens: int

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 0.0 where nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per request and verify step, bonus included."""
        return self.num_tokens / self.num_steps if self.num_steps else 0.0


def run_batch(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
) -> BatchRun:
    """Run the prompts to their ends; nothing else may be in the engine.

    Args:
        params: one for all prompts, or one each.
    """
    assert not engine.has_unfinished_requests(), "a measured engine must have no other requests"
    request_ids = [f"bench-{index}" for index in range(len(prompts))]
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    begin = time.perf_counter()
    for request_id, prompt, one in zip(request_ids, prompts, each, strict=True):
        engine.add_request(request_id, prompt, one)
    timer = DecodeTimer(len(prompts))
    last: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        outputs = engine.step()
        timer.add(outputs, time.perf_counter() - begin)
        last.update((output.request_id, output) for output in outputs if output.finished)
    done = [last[request_id] for request_id in request_ids]
    seconds, num_tokens = timer.window
    return BatchRun(
        first_token_seconds=timer.start or 0.0,
        token_ids=[output.outputs[0].token_ids for output in done],
        token_origins=[output.outputs[0].token_origins for output in done],
        decode_seconds=seconds,
        decode_tokens=num_tokens,
        num_steps=sum(output.metrics.num_steps for output in done),
        num_draft_tokens=sum(output.metrics.num_draft_tokens for output in done),
        num_accepted_tokens=sum(output.metrics.num_accepted_tokens for output in done),
    )


@contextmanager
def drafting(engine: Engine, k: DraftLengthChoice) -> Iterator[None]:
    """Draft at a fixed length meanwhile (0: off), or as the engine's own policy says."""
    length = engine.drafting.length
    policy, limit = length.policy, length.limit
    length.limit = length.most
    if k != OWN:
        assert isinstance(k, int), f"k={k!r}: expected a length or {OWN!r}"
        length.policy = FixedLength(k)
    try:
        yield
    finally:
        length.policy, length.limit = policy, limit
