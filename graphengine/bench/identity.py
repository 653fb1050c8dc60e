"""Identity: the same requests with speculation off and on in one engine, token by token.

Owns the comparison of two streams of one seed and what is known of a difference: where it is, and
how near a tie the model was there. For greedy requests, and for sampled ones verified exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from graphengine.bench.pairs import parting
from graphengine.bench.serve import Job, Stream, serve
from graphengine.bench.verdict import Verdict, nothing_drafted
from graphengine.engine import Engine
from graphengine.sampling.params import SamplingParams

Difference = Literal["token", "text", "finish reason"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Flip:
    """The first difference of two streams.

    Attributes:
        what: the ids are compared first, and where they are the same the others.
        position: in the answer, from 0; None where the ids are the same.
        off, on: token ids (None: that stream ended there), or texts, or reasons.
        likeliest: the two likeliest tokens there and their log-probabilities, by the model's own
            logits, before any processor or noise; empty where the ids are the same.
    """

    prompt_id: str
    sample: int
    seed: int | None
    what: Difference
    position: int | None
    off: int | str | None
    on: int | str | None
    likeliest: list[tuple[int, float]] = field(default_factory=list)

    @property
    def gap(self) -> float | None:
        """By how much the likeliest token leads, in log-probability: about 0 is a near-tie."""
        values = [value for _, value in self.likeliest]
        return values[0] - values[1] if len(values) == 2 else None

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "top2_gap": self.gap}


@dataclass(frozen=True, kw_only=True, slots=True)
class Twin:
    """A request, both ways."""

    job: Job
    off: Stream
    on: Stream
    flip: Flip | None

    def as_json(self) -> dict[str, Any]:
        return {
            "group": self.job.asked.group,
            "prompt": self.job.asked.prompt_id,
            "sample": self.job.sample,
            "seed": self.job.params.seed,
            "identical": self.flip is None,
            "off": self.off.as_json(),
            "on": self.on.as_json(),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class IdentityCheck:
    """All requests, both ways."""

    twins: list[Twin]

    @property
    def flips(self) -> list[Flip]:
        return [twin.flip for twin in self.twins if twin.flip is not None]

    @property
    def verdict(self) -> Verdict:
        if self.flips:
            return Verdict(False, f"different: {len(self.flips)} of {len(self.twins)} streams")
        if not sum(twin.on.num_draft_tokens for twin in self.twins):
            return nothing_drafted("at all")
        num_tokens = sum(len(twin.on.token_ids) for twin in self.twins)
        accepted = any(twin.on.num_accepted_tokens for twin in self.twins)
        but = "" if accepted else "; no draft was accepted, so that accepting was not tried"
        return Verdict(True, f"identical: {len(self.twins)} streams, {num_tokens} tokens{but}")

    def as_json(self) -> dict[str, Any]:
        return {
            "streams": [twin.as_json() for twin in self.twins],
            "flips": [flip.as_json() for flip in self.flips],
        }


def check_identity(
    engine: Engine, jobs: Sequence[Job], progress: Callable[[], None] = lambda: None
) -> IdentityCheck:
    """Serve the jobs off, then on, and compare; `progress` is called after each of both.

    Raises:
        ValueError: a prompt does not fit.
    """
    off = serve(engine, jobs, draft_limit=0, progress=progress)
    most = engine.resolved.sizes.max_draft_tokens
    on = serve(engine, jobs, draft_limit=most, progress=progress)
    twins = [
        Twin(job=job, off=left, on=right, flip=first_flip(job, left, right))
        for job, left, right in zip(jobs, off, on, strict=True)
    ]
    return IdentityCheck(twins=_with_likeliest(engine, twins))


def first_flip(job: Job, off: Stream, on: Stream) -> Flip | None:
    """Where the streams of a job differ first; None where they are identical."""
    position = parting(off.token_ids, on.token_ids)
    what: Difference
    left: int | str | None
    right: int | str | None
    if position is not None:
        what = "token"
        left, right = (dict(enumerate(one.token_ids)).get(position) for one in (off, on))
    elif off.text != on.text:
        what, left, right = "text", off.text, on.text
    elif off.finish_reason != on.finish_reason:
        what, left, right = "finish reason", off.finish_reason, on.finish_reason
    else:
        return None
    return Flip(
        prompt_id=job.asked.prompt_id,
        sample=job.sample,
        seed=job.params.seed,
        what=what,
        position=position,
        off=left,
        on=right,
    )


def _with_likeliest(engine: Engine, twins: Sequence[Twin]) -> list[Twin]:
    """Ask the model, speculation off, what it found likely where two streams part."""
    told, jobs = list(twins), {}
    for index, twin in enumerate(twins):
        if twin.flip is not None and twin.flip.position is not None:
            common = twin.off.token_ids[: twin.flip.position]
            asked = replace(twin.job.asked, token_ids=[*twin.job.asked.token_ids, *common])
            neutral = SamplingParams(max_tokens=1, logprobs=2)
            jobs[index] = replace(twin.job, asked=asked, params=neutral)
    streams = serve(engine, list(jobs.values()), draft_limit=0)
    for index, stream in zip(jobs, streams, strict=True):
        flip, logprobs = twins[index].flip, stream.logprobs
        assert flip is not None, "jobs are of streams that part"
        assert logprobs is not None, "the job asks for them"
        found = sorted((-entry.logprob, token) for token, entry in logprobs[0].items())
        likeliest = [(token, -value) for value, token in found[:2]]
        told[index] = replace(twins[index], flip=replace(flip, likeliest=likeliest))
    return told
