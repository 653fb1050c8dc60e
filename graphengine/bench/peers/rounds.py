"""Rounds: engines side by side on the same token ids, plain and with drafts, taking turns.

Owns the order of turns (it moves on by one with every round, so that drift hits all alike) and what
a turn is compared with: the same engine's plain tokens, and our tokens.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

from graphengine.bench.measure import OWN, Answer, drafting, run_batch
from graphengine.engine import Engine
from graphengine.sampling.params import SamplingParams

OURS = "graphengine"
SETTLE_SECONDS = 0.3  # between turns, so that no thread of another side is still spinning


class Contender(Protocol):
    """One engine, with or without drafts."""

    name: str
    k: int  # most drafts of a step; 0: plain
    description: dict[str, Any]
    start_seconds: float

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Answer:
        """Greedy continuations of exactly `num_tokens` tokens."""
        ...

    @property
    def peak_bytes(self) -> int:
        """Most resident memory so far."""
        ...


class OwnContender:
    """Ours, in this process; with drafts its own policy chooses their length."""

    name = OURS

    def __init__(self, engine: Engine, k: int) -> None:
        self._engine, self.k = engine, k
        self.start_seconds = sum(engine.start_times.seconds.values())
        self.description: dict[str, Any] = {
            "version": "this one",
            "what": "off" if k == 0 else f"{engine.resolved.speculative}",
        }

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Answer:
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        with drafting(self._engine, OWN if self.k else 0):
            return run_batch(self._engine, prompts, params)

    @property
    def peak_bytes(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One batch by one contender."""

    contender: str
    k: int
    workload: str
    batch_size: int
    round: int
    rate: float  # decode tokens a second, first tokens excluded
    first_token_seconds: float
    num_tokens: int
    num_as_plain: int | None  # requests with the tokens of the same engine's plain turn
    num_agreeing: int  # leading tokens that are ours, summed over requests


Batches = Mapping[tuple[str, int], Sequence[Sequence[int]]]  # prompts by workload and batch size


def run_rounds(
    contenders: Sequence[Contender],
    batches: Batches,
    *,
    rounds: int,
    num_tokens: int,
    progress: Callable[[Turn], None] = lambda one: None,
) -> list[Turn]:
    """Let all decode every batch in turns.

    Args:
        contenders: ours, plain, among them. One that does not serve a batch with drafts (as
            transformers, beyond one request) is left out there.
        rounds: timed rounds; one more goes before, untimed.
        num_tokens: tokens of every answer; ends of text are ignored.
        progress: called after each timed turn.
    """
    turns = []
    for round_number in range(-1, rounds):
        for (workload, size), prompts in batches.items():
            served = [one for one in contenders if serves(one, size)]
            start = (round_number + 1) % len(served)
            answers: dict[tuple[str, int], Answer] = {}
            for one in served[start:] + served[:start]:
                time.sleep(SETTLE_SECONDS)
                answers[one.name, one.k] = one.generate(prompts, num_tokens)
            if round_number < 0:
                continue
            for (name, k), answer in answers.items():
                turns.append(_turn(name, k, workload, round_number, answers, answer))
                progress(turns[-1])
    return turns


def serves(contender: Contender, batch_size: int) -> bool:
    """Whether it can do a batch of this size: transformers looks drafts up for one request."""
    return not (contender.name == "transformers" and contender.k and batch_size > 1)


def _turn(
    name: str,
    k: int,
    workload: str,
    round_number: int,
    answers: Mapping[tuple[str, int], Answer],
    answer: Answer,
) -> Turn:
    plain, ours = answers.get((name, 0)), answers[OURS, 0]
    as_plain = None
    if k and plain is not None:
        pairs = zip(plain.token_ids, answer.token_ids, strict=True)
        as_plain = sum(one == other for one, other in pairs)
    return Turn(
        contender=name,
        k=k,
        workload=workload,
        batch_size=len(answer.token_ids),
        round=round_number,
        rate=answer.rate,
        first_token_seconds=answer.first_token_seconds,
        num_tokens=answer.num_tokens,
        num_as_plain=as_plain,
        num_agreeing=sum(map(_common_prefix, answer.token_ids, ours.token_ids)),
    )


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
