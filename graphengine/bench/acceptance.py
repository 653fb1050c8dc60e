"""Acceptance: how many drafts of a workload come true, at which place, and what a step emits.

Counts alone, no clock: the same on any machine, for the same weights, prompts and seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphengine.bench.measure import run_batch
from graphengine.engine import Engine
from graphengine.sampling.params import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Acceptance:
    """What became of the drafts of some requests."""

    num_tokens: int  # emitted
    num_steps: int  # summed over requests, with drafts or without
    num_drafts: int  # steps that carried some
    num_draft_tokens: int
    accepted_per_position: tuple[int, ...]

    @property
    def rate(self) -> float:
        """Accepted over drafted tokens; 0.0 where nothing was drafted."""
        accepted = sum(self.accepted_per_position)
        return accepted / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per request and verify step, bonus included."""
        return self.num_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def conditional(self) -> tuple[float, ...]:
        """Share of accepted drafts at each place among those whose places before were accepted.

        A draft that was too short to have the place counts as rejected there.
        """
        before = (self.num_drafts, *self.accepted_per_position)
        return tuple(
            accepted / reached if reached else 0.0
            for accepted, reached in zip(self.accepted_per_position, before, strict=False)
        )

    def __str__(self) -> str:
        places = ", ".join(f"{share:.2f}" for share in self.conditional)
        return (
            f"{self.mean_acceptance_length:.2f} tokens a step, {self.rate:.1%} of "
            f"{self.num_draft_tokens} drafts accepted, by place {places}"
        )


def measure_acceptance(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    batch_size: int,
) -> tuple[Acceptance, list[list[int]]]:
    """Serve the prompts and count; nothing else may be in the engine.

    Args:
        params: one for each prompt.
        batch_size: requests that are served together.

    Returns:
        The counts, and the tokens of every answer.
    """
    streams: list[list[int]] = []
    before = engine.stats()
    for start in range(0, len(prompts), batch_size):
        part = slice(start, start + batch_size)
        streams += run_batch(engine, prompts[part], params[part]).token_ids
    after = engine.stats()
    places = zip(after.accepted_per_position, before.accepted_per_position, strict=True)
    found = Acceptance(
        num_tokens=after.num_emitted_tokens - before.num_emitted_tokens,
        num_steps=after.num_request_steps - before.num_request_steps,
        num_drafts=after.num_drafts - before.num_drafts,
        num_draft_tokens=after.num_draft_tokens - before.num_draft_tokens,
        accepted_per_position=tuple(new - old for new, old in places),
    )
    return found, streams
