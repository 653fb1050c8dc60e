"""Streams: answers of many requests through one engine, as a check compares them.

Owns what is asked (a prompt, a sample's number and its seed) and what is kept of an answer. Judges
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graphengine.engine import Engine
from graphengine.outputs import RequestOutput
from graphengine.request import FinishReason, Origin
from graphengine.sampling.logprobs import Logprob
from graphengine.sampling.params import MAX_SEED, SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A prompt as token ids. `group`: the list that it is from."""

    group: str
    prompt_id: str
    token_ids: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One request; `number` is that of the prompt, since lists may repeat a name."""

    asked: Asked
    number: int
    sample: int
    params: SamplingParams

    @property
    def request_id(self) -> str:
        return f"{self.asked.prompt_id} ({self.number}.{self.sample})"

    @property
    def name(self) -> str:
        """As a user knows it."""
        return f"{self.asked.prompt_id}, sample {self.sample}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """An answer."""

    token_ids: list[int]
    origins: list[Origin]
    text: str
    finish_reason: FinishReason | None
    logprobs: list[dict[int, Logprob]] | None
    num_draft_tokens: int
    num_accepted_tokens: int

    @classmethod
    def of(cls, output: RequestOutput) -> Stream:
        """What a finished request gave."""
        answer, metrics = output.outputs[0], output.metrics
        return cls(
            token_ids=answer.token_ids,
            origins=answer.token_origins,
            text=answer.text,
            finish_reason=answer.finish_reason,
            logprobs=answer.logprobs,
            num_draft_tokens=metrics.num_draft_tokens,
            num_accepted_tokens=metrics.num_accepted_tokens,
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "draft_tokens": self.num_draft_tokens,
            "accepted_tokens": self.num_accepted_tokens,
        }


def make_jobs(
    prompts: Sequence[Asked], params: SamplingParams, *, samples: int, first_seed: int
) -> list[Job]:
    """Every prompt `samples` times, each with a seed of its own, counted from `first_seed`."""
    return [
        Job(
            asked=asked,
            number=number,
            sample=sample,
            params=replace(params, seed=(first_seed + number * samples + sample) % (MAX_SEED + 1)),
        )
        for number, asked in enumerate(prompts)
        for sample in range(samples)
    ]


def serve(
    engine: Engine,
    jobs: Sequence[Job],
    *,
    draft_limit: int,
    progress: Callable[[], None] = lambda: None,
) -> list[Stream]:
    """Run all jobs to their ends, as many at once as the engine takes.

    The prefix cache is emptied first: no side may live on what the other has computed.

    Args:
        engine: idle.
        draft_limit: 0: speculation is off.
        progress: called whenever a request has ended.

    Raises:
        ValueError: a prompt does not fit.
    """
    assert not engine.has_unfinished_requests(), "a checked engine must have no other requests"
    engine.reset_prefix_cache()
    engine.draft_limit = draft_limit
    for job in jobs:
        engine.add_request(job.request_id, job.asked.token_ids, job.params)
    found: dict[str, Stream] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[output.request_id] = Stream.of(output)
                progress()
    streams = [found[job.request_id] for job in jobs]
    drafted = sum(stream.num_draft_tokens for stream in streams)
    assert draft_limit > 0 or drafted == 0, "drafts with speculation off"
    return streams
