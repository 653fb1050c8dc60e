"""Laws: whether answers are distributed alike with speculation off and on.

For `verification="rejection"`, which keeps the law of a request and not its tokens. Both sides are
samples of their own, with seeds fixed beforehand that no two requests share. Owns which tokens are
counted and tested; the tests themselves are `distributions`'.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from graphengine.bench.distributions import holm, num_categories, total_variation, two_sample_p
from graphengine.bench.serve import Job, Stream, serve
from graphengine.bench.verdict import Verdict, nothing_drafted
from graphengine.engine import Engine

LEVEL = 0.05
ON_SEEDS = 1 << 32  # from a side's first seed to the other's
NUM_POSITIONS = 8  # of an answer, each tested by itself and together with the one before it
ENDED = -1  # the token of an answer that is over


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One test: the tokens at one or more positions of a prompt's answers.

    Attributes:
        number: of the prompt.
        positions: in the answer, from 0.
        tokens: what came there on either side, `[n]` tuples as long as `positions`.
        off, on: how often, `[n]`.
        num_drafts: how many of the tokens there were judged drafts, on.
        num_categories: of tokens, once rare ones are pooled. With one there is nothing to test.
        p: of the test that both sides have the same law (`two_sample_p`).
        p_adjusted: by Holm's method, for all tests of the run.
    """

    number: int
    prompt_id: str
    positions: tuple[int, ...]
    tokens: list[tuple[int, ...]]
    off: list[int]
    on: list[int]
    num_drafts: int
    num_categories: int
    p: float
    p_adjusted: float = 1.0

    @property
    def total_variation(self) -> float:
        """Of the raw counts: not 0 for samples of one law either."""
        return total_variation(self.off, self.on)

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt_id,
            "positions": list(self.positions),
            "counts": [
                {"tokens": list(tokens), "off": off, "on": on}
                for tokens, off, on in zip(self.tokens, self.off, self.on, strict=True)
            ],
            "judged_drafts": self.num_drafts,
            "categories": self.num_categories,
            "total_variation": self.total_variation,
            "p": self.p,
            "p_holm": self.p_adjusted,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """Jobs and their streams, in the same order."""

    jobs: list[Job]
    streams: list[Stream]

    def of(self, number: int) -> list[Stream]:
        """Those of one prompt."""
        pairs = zip(self.jobs, self.streams, strict=True)
        return [stream for job, stream in pairs if job.number == number]

    def as_json(self) -> list[dict[str, Any]]:
        return [
            {
                "group": job.asked.group,
                "prompt": job.asked.prompt_id,
                "sample": job.sample,
                "seed": job.params.seed,
                **stream.as_json(),
            }
            for job, stream in zip(self.jobs, self.streams, strict=True)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class LawCheck:
    """Both samples and all tests, prompt by prompt."""

    off: Side
    on: Side
    places: list[Place]

    @property
    def tested(self) -> list[Place]:
        """Places with two categories or more, which counts of both sides together decide."""
        return [place for place in self.places if place.num_categories > 1]

    @property
    def different(self) -> list[Place]:
        return [place for place in self.tested if place.p_adjusted < LEVEL]

    @property
    def verdict(self) -> Verdict:
        if not self.tested:
            return Verdict(
                False,
                "nothing was tested: no position had two tokens that came often enough; take more "
                "--samples, or another --temperature or --top-k",
            )
        smallest = min(place.p_adjusted for place in self.tested)
        last = max(place.positions[-1] for place in self.tested)
        tests = (
            f"smallest p after Holm {smallest:.2g}, {len(self.tested)} tests of tokens 0 to {last} "
            "and of neighbours"
        )
        if self.different:
            return Verdict(
                False,
                f"different ({tests}); of engines without a fault one in {1 / LEVEL:.0f} is called "
                "that, so look again with another --seed and more --samples",
            )
        if not any(place.num_drafts for place in self.tested):
            return nothing_drafted("where the tests look")
        return Verdict(True, f"no difference found ({tests})")

    def as_json(self) -> dict[str, Any]:
        return {
            "level": LEVEL,
            "tests": [place.as_json() for place in self.places],
            "off": self.off.as_json(),
            "on": self.on.as_json(),
        }


def check_laws(
    engine: Engine,
    off: Sequence[Job],
    on: Sequence[Job],
    progress: Callable[[], None] = lambda: None,
) -> LawCheck:
    """Serve each side's jobs, of the same prompts and other seeds, and test them.

    Raises:
        ValueError: a prompt does not fit.
    """
    most = engine.resolved.sizes.max_draft_tokens
    sides = [
        Side(jobs=list(jobs), streams=serve(engine, jobs, draft_limit=limit, progress=progress))
        for jobs, limit in ((off, 0), (on, most))
    ]
    places = []
    for number, asked in {job.number: job.asked for job in off}.items():
        left, right = (side.of(number) for side in sides)
        longest = max(len(stream.token_ids) for stream in (*left, *right))
        last = range(min(NUM_POSITIONS, longest))
        # A fault may leave each token's law as it was, and show only in what follows what.
        for positions in [*((at,) for at in last), *pairwise(last)]:
            places.append(_place(number, asked.prompt_id, positions, left, right))
    return LawCheck(off=sides[0], on=sides[1], places=_adjusted(places))


def _adjusted(places: Sequence[Place]) -> list[Place]:
    """With p-values for their number; where there is nothing to test, none is counted."""
    tests = [index for index, place in enumerate(places) if place.num_categories > 1]
    found = dict(zip(tests, holm([places[index].p for index in tests]), strict=True))
    return [replace(place, p_adjusted=found.get(index, 1.0)) for index, place in enumerate(places)]


def _place(
    number: int,
    prompt_id: str,
    positions: tuple[int, ...],
    off: Sequence[Stream],
    on: Sequence[Stream],
) -> Place:
    counts = [Counter(_tokens(stream, positions) for stream in side) for side in (off, on)]
    tokens = sorted(counts[0] | counts[1], key=lambda one: (-counts[0][one] - counts[1][one], one))
    first, second = ([count[one] for one in tokens] for count in counts)
    return Place(
        number=number,
        prompt_id=prompt_id,
        positions=positions,
        tokens=tokens,
        off=first,
        on=second,
        num_drafts=sum(_num_judged(stream, positions) for stream in on),
        num_categories=num_categories(first, second),
        p=two_sample_p(first, second),
    )


def _tokens(stream: Stream, positions: tuple[int, ...]) -> tuple[int, ...]:
    ids = dict(enumerate(stream.token_ids))
    return tuple(ids.get(position, ENDED) for position in positions)


def _num_judged(stream: Stream, positions: tuple[int, ...]) -> int:
    """Tokens there that are an accepted draft or stand in the place of a rejected one."""
    origins = dict(enumerate(stream.origins))
    return sum(origins.get(position, "bonus") != "bonus" for position in positions)
