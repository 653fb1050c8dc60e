"""Pairs: the same batch with speculation off and on, one right after the other in one engine.

Owns the order (which side goes first alternates, so that drift hits both alike) and the comparison
of the two token streams.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from graphengine.bench.measure import BatchRun, run_batch
from graphengine.bench.workloads import Workloads, batches, encode
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
    k: int
    round: int
    off_first: bool
    off: BatchRun
    on: BatchRun
    difference: Difference | None

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


@dataclass(frozen=True, kw_only=True, slots=True)
class PairPlan:
    """Which pairs to run."""

    workloads: Workloads
    batch_sizes: Sequence[int]
    draft_lengths: Sequence[int]
    rounds: int
    max_tokens: int

    @property
    def num_pairs(self) -> int:
        cells = sum(
            len(batches(prompts, size))
            for prompts in self.workloads.values()
            for size in self.batch_sizes
        )
        return cells * len(self.draft_lengths) * self.rounds


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
        self._params = SamplingParams(max_tokens=max_tokens)
        self._num_pairs: Counter[tuple[int, int]] = Counter()  # by k and round

    def warm_up(self, prompt: Sequence[int]) -> None:
        """A short run of both sides, thrown away."""
        params = SamplingParams(max_tokens=8)
        for limit in (0, self.engine.resolved.sizes.max_draft_tokens):
            self.engine.draft_limit = limit
            run_batch(self.engine, [prompt], params)

    def run(
        self,
        workload: str,
        prompt_ids: Sequence[str],
        prompts: Sequence[Sequence[int]],
        *,
        k: int,
        round: int = 0,
    ) -> Pair:
        """Run one batch off and on.

        Who goes first alternates from batch to batch and, for each batch, from round to round.
        """
        off_first = (self._num_pairs[k, round] + round) % 2 == 0
        self._num_pairs[k, round] += 1
        runs: dict[int, BatchRun] = {}
        for limit in (0, k) if off_first else (k, 0):
            self.engine.draft_limit = limit
            runs[limit] = run_batch(self.engine, prompts, self._params)
        off, on = runs[0], runs[k]
        return Pair(
            workload=workload,
            prompt_ids=list(prompt_ids),
            k=k,
            round=round,
            off_first=off_first,
            off=off,
            on=on,
            difference=first_difference(prompt_ids, off.token_ids, on.token_ids),
        )

    def run_plan(self, plan: PairPlan, progress: Callable[[], None] = lambda: None) -> list[Pair]:
        """Run every pair of a plan, rounds outermost; `progress` is called after each."""
        pairs = []
        for round_number in range(plan.rounds):
            for workload, prompts in plan.workloads.items():
                for size in plan.batch_sizes:
                    for batch in batches(prompts, size):
                        ids = [encode(self.engine.tokenizer, prompt) for prompt in batch]
                        for k in plan.draft_lengths:
                            names = [prompt.id for prompt in batch]
                            pairs.append(self.run(workload, names, ids, k=k, round=round_number))
                            progress()
        return pairs


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
