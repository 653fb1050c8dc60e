"""Pairs: the same batch with speculation off and on, one right after the other in one engine.

Owns the order (which side goes first alternates, so that drift hits both alike), what "on" is (a
fixed draft length, or the engine's own policy) and the comparison of the two token streams.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median
from typing import Any

from graphengine.bench.measure import BatchRun, DraftLengthChoice, drafting, run_batch
from graphengine.bench.ratios import median_interval
from graphengine.bench.workloads import Prompt, Workloads, batches, encode
from graphengine.engine import Engine
from graphengine.sampling.params import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first token at which two streams of a request part; None: one ended there."""

    prompt_id: str
    position: int
    off: int | None
    on: int | None

    def __str__(self) -> str:
        return (
            f"{self.prompt_id}: token {self.position} is {self.off} with speculation off "
            f"and {self.on} with it on"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One batch, both ways."""

    workload: str
    prompt_ids: list[str]
    k: DraftLengthChoice
    round: int
    off_first: bool
    is_sampled: bool  # each round with seeds of its own
    off: BatchRun
    on: BatchRun
    difference: Difference | None  # not looked for where only the distribution is to be the same

    @property
    def batch_size(self) -> int:
        return len(self.prompt_ids)

    @property
    def ratio(self) -> float | None:
        """Decode rate on over off; None where either side has no decode window."""
        return self.on.rate / self.off.rate if self.on.rate and self.off.rate else None

    def as_json(self) -> dict[str, Any]:
        """Everything measured; tokens as counts."""
        return {
            "workload": self.workload,
            "prompts": self.prompt_ids,
            "batch_size": self.batch_size,
            "k": self.k,
            "round": self.round,
            "off_first": self.off_first,
            "is_sampled": self.is_sampled,
            "off": _run_json(self.off),
            "on": _run_json(self.on),
            "ratio": self.ratio,
            "identical": self.difference is None,
            "difference": None if self.difference is None else str(self.difference),
        }


def _run_json(run: BatchRun) -> dict[str, Any]:
    return {
        "tokens": run.num_tokens,
        "decode_tokens": run.decode_tokens,
        "decode_seconds": run.decode_seconds,
        "tokens_per_second": run.rate,
        "request_steps": run.num_steps,
        "draft_tokens": run.num_draft_tokens,
        "accepted_tokens": run.num_accepted_tokens,
    }


def independent_ratios(pairs: Sequence[Pair]) -> list[float]:
    """One paired ratio a batch, the median over its rounds.

    Repeating a batch says nothing new about other prompts, so rounds must not narrow an interval
    over them. Where there is one batch only, its rounds are the values, and the interval is about
    the noise of the machine alone. Rounds of sampled answers are answers of their own.
    """
    rounds: dict[tuple[object, ...], list[float]] = {}
    for pair in pairs:
        if pair.ratio is not None:
            key = (*pair.prompt_ids, pair.round if pair.is_sampled else None)
            rounds.setdefault(key, []).append(pair.ratio)
    if len(rounds) == 1:
        return next(iter(rounds.values()))
    return [median(ratios) for ratios in rounds.values()]


@dataclass(frozen=True, kw_only=True, slots=True)
class PairPlan:
    """Which pairs to run.

    Attributes:
        rounds: of every pair; with `half_width`, the most of them.
        half_width: of the 95 % interval, as a share of the median, that ends the rounds of a
            workload, batch size and draft length; None: all rounds.
    """

    workloads: Workloads
    batch_sizes: Sequence[int]
    draft_lengths: Sequence[DraftLengthChoice]
    rounds: int
    max_tokens: int
    half_width: float | None = None

    @property
    def num_pairs(self) -> int:
        """Most pairs that there will be."""
        cells = sum(
            len(batches(prompts, size))
            for prompts in self.workloads.values()
            for size in self.batch_sizes
        )
        return cells * len(self.draft_lengths) * self.rounds

    def is_precise(self, pairs: Sequence[Pair]) -> bool:
        """Whether these need no more rounds."""
        ratios = independent_ratios(pairs)
        if self.half_width is None or not ratios:
            return False
        return median_interval(ratios).half_width <= self.half_width


class PairRunner:
    """Runs pairs on one engine, whose prefix cache must be off: it would favour the second side.

    Args:
        engine: built with speculation.
        max_tokens: most tokens of an answer; answers end at the model's own end, too.

    Raises:
        ValueError: the engine was built without speculation.
    """

    def __init__(self, engine: Engine, *, max_tokens: int) -> None:
        if engine.proposer is None:
            raise ValueError("speculation is off: there is nothing to compare; pass --speculate")
        assert not engine.config.cache.enable_prefix_caching, "prefix caching would favour a side"
        self.engine = engine
        assert engine.resolved.speculative is not None, "there is a proposer"
        self._speculative = engine.resolved.speculative
        self._max_tokens = max_tokens
        self._num_pairs: Counter[tuple[DraftLengthChoice, int]] = Counter()  # by k and round

    def warm_up(self, prompt: Prompt) -> None:
        """A short run of both sides, thrown away."""
        ids = encode(self.engine.tokenizer, prompt)
        for k in (0, self.engine.resolved.sizes.max_draft_tokens):
            with drafting(self.engine, k):
                run_batch(self.engine, [ids], SamplingParams(max_tokens=8))

    def run(
        self, workload: str, prompts: Sequence[Prompt], *, k: DraftLengthChoice, round: int = 0
    ) -> Pair:
        """Run one batch off and on.

        Who goes first alternates from batch to batch and, for each batch, from round to round.
        """
        off_first = (self._num_pairs[k, round] + round) % 2 == 0
        self._num_pairs[k, round] += 1
        ids = [encode(self.engine.tokenizer, prompt) for prompt in prompts]
        params = [self._params(prompt, round) for prompt in prompts]
        runs: dict[DraftLengthChoice, BatchRun] = {}
        for side in (0, k) if off_first else (k, 0):
            with drafting(self.engine, side):
                runs[side] = run_batch(self.engine, ids, params)
        names = [prompt.id for prompt in prompts]
        is_sampled = any(prompt.temperature for prompt in prompts)
        is_exact = not is_sampled or self._speculative.verification == "exact"
        off, on = runs[0].token_ids, runs[k].token_ids
        return Pair(
            workload=workload,
            prompt_ids=names,
            k=k,
            round=round,
            off_first=off_first,
            is_sampled=is_sampled,
            off=runs[0],
            on=runs[k],
            difference=first_difference(names, off, on) if is_exact else None,
        )

    def run_plan(self, plan: PairPlan, progress: Callable[[], None] = lambda: None) -> list[Pair]:
        """Run every pair of a plan, rounds outermost; `progress` is called after each."""
        cells: dict[tuple[str, int, DraftLengthChoice], list[Pair]] = {}
        for round_number in range(plan.rounds):
            for workload, prompts in plan.workloads.items():
                for size in plan.batch_sizes:
                    wanted = [
                        (k, pairs)
                        for k in plan.draft_lengths
                        for pairs in [cells.setdefault((workload, size, k), [])]
                        if not plan.is_precise(pairs)
                    ]
                    for batch in batches(prompts, size):
                        for k, pairs in wanted:
                            pairs.append(self.run(workload, batch, k=k, round=round_number))
                            progress()
        return [pair for pairs in cells.values() for pair in pairs]

    def _params(self, prompt: Prompt, round: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=self._max_tokens,
            temperature=prompt.temperature,
            seed=round if prompt.temperature else None,
        )


def first_difference(
    prompt_ids: Sequence[str], off: Sequence[Sequence[int]], on: Sequence[Sequence[int]]
) -> Difference | None:
    """Where the streams of a batch part first; None where they are identical."""
    for prompt_id, left, right in zip(prompt_ids, off, on, strict=True):
        position = parting(left, right)
        if position is not None:
            a, b = (dict(enumerate(stream)).get(position) for stream in (left, right))
            return Difference(prompt_id=prompt_id, position=position, off=a, on=b)
    return None


def parting(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The position where two streams part, one that ends before the other included; or None."""
    pairs = zip_longest(left, right)
    return next((position for position, (a, b) in enumerate(pairs) if a != b), None)
