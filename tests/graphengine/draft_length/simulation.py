"""A decode loop without a model: requests whose drafts are accepted at known rates, steps that cost
what a table says. What a policy is told is what an engine would tell it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from graphengine.draft_length.policy import Batch, Policy

LENGTHS = (0, 1, 2, 3, 6)
# Milliseconds of steps of SmolLM2 on two cores: by number of requests, for each of LENGTHS.
VERIFY = {
    1: (10.6, 11.7, 12.4, 13.3, 17.6),
    4: (13.3, 18.5, 21.7, 28.3, 45.3),
    16: (28.0, 51.5, 75.2, 99.5, 181.7),
}
DRAFT = {1: (0, 1.5, 2.2, 2.9, 5.0), 4: (0, 2, 3, 4, 7), 16: (0, 5, 8, 11, 20)}
HOST_SECONDS = 30e-6  # of asking a proposer of the host
CATCH_UP_SECONDS = 1e-4  # of a token that a model's drafts have missed

Rate = Callable[[int, int], float]  # request, tokens so far -> acceptance at every place


@dataclass(frozen=True)
class Table:
    """Costs; see `graphengine.draft_length.costs`."""

    drafts: bool  # whether drafting is captured, and costs its time

    def seconds(self, num_reqs: int, lengths: Sequence[int], tier: str) -> list[float]:
        places = [LENGTHS.index(length) for length in lengths]
        return [
            (VERIFY[num_reqs][place] + (DRAFT[num_reqs][place] if self.drafts else 0)) / 1e3
            for place in places
        ]


@dataclass
class Run:
    """What came of it."""

    speed: float  # tokens a second
    lengths: list[int] = field(default_factory=list)  # of the steps, verified


@dataclass(frozen=True)
class Load:
    """Requests that run together from the first token to the last."""

    num_reqs: int
    rate: Rate
    has_model: bool = False  # whether a model drafts, or the host where it finds a match
    match_rate: float = 1.0  # how often the host has a draft
    num_tokens: int = 600  # of each request
    seed: int = 0

    def run(self, policy: Policy) -> Run:
        """Serve it; the same draws whatever the policy does."""
        draw, ids = random.Random(self.seed), [f"r{index}" for index in range(self.num_reqs)]
        tokens, missed = [0] * self.num_reqs, [0] * self.num_reqs
        seconds, run = 0.0, Run(0.0)
        while sum(tokens) < self.num_tokens * self.num_reqs:
            batch = Batch(ids, "greedy")
            longest = policy.longest(batch)
            allowed = [min(one, longest) for one in policy.allowances(batch, longest)]
            found = [draw.random() < self.match_rate for _ in ids]
            good = [self._num_good(draw, index, tokens[index]) for index in range(self.num_reqs)]
            drafts, step, draft_seconds = self._drafts(policy, batch, allowed, found)
            verified = drafts if self.has_model else policy.worthwhile(batch, drafts)
            cell = next(length for length in LENGTHS if length >= max(verified))
            step += Table(False).seconds(self.num_reqs, [cell], "greedy")[0]
            listens = longest == 0 and not self.has_model and policy.may_listen()
            draft_seconds += HOST_SECONDS * listens
            emitted = [min(a, b) + 1 for a, b in zip(verified, good, strict=True)]
            for index, name in enumerate(ids):
                tokens[index] += emitted[index]
                missed[index] += emitted[index]
                if self.has_model and drafts[index]:
                    step += CATCH_UP_SECONDS * (missed[index] - emitted[index])
                    missed[index] = 0
                asked = LENGTHS[-1] * found[index] if listens else drafts[index]
                if asked:  # verified or judged in hindsight
                    policy.observe(name, asked, min(asked, good[index]))
            policy.spent(step + draft_seconds, draft_seconds, sum(emitted) / self.num_reqs)
            seconds += step + draft_seconds
            run.lengths.append(cell)
        run.speed = sum(tokens) / seconds
        return run

    def _num_good(self, draw: random.Random, index: int, num_tokens: int) -> int:
        count, rate = 0, self.rate(index, num_tokens)
        while count < LENGTHS[-1] and draw.random() < rate:
            count += 1
        return count

    def _drafts(
        self, policy: Policy, batch: Batch, allowed: list[int], found: list[bool]
    ) -> tuple[list[int], float, float]:
        """Drafts of each, seconds of a captured chain, seconds of the host."""
        longest = max(allowed)
        if longest == 0:
            return allowed, 0.0, 0.0
        if self.has_model:
            place = next(place for place, length in enumerate(LENGTHS) if length >= longest)
            return allowed, DRAFT[self.num_reqs][place] / 1e3, 0.0
        drafts = [count if hit else 0 for count, hit in zip(allowed, found, strict=True)]
        return drafts, 0.0, HOST_SECONDS
