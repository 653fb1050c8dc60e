"""A draft-length policy without rhyme or reason: whatever it says, no token may follow it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from graphengine.draft_length.policy import Batch, Policy
from graphengine.engine import Engine


class RandomPolicy:
    """Decides by dice; holds what it is told to what may be true.

    Args:
        lengths: captured draft lengths.
        seed: of the dice.
    """

    def __init__(self, lengths: Sequence[int], seed: int) -> None:
        self._lengths = lengths
        self._draw = random.Random(seed)
        self.num_observed = 0

    def longest(self, batch: Batch) -> int:
        return self._draw.choice(self._lengths)

    def allowances(self, batch: Batch, longest: int) -> list[int]:
        return [self._draw.randint(0, longest) for _ in batch.request_ids]

    def worthwhile(self, batch: Batch, lengths: Sequence[int]) -> list[int]:
        return [self._draw.randint(0, length) for length in lengths]

    def may_listen(self) -> bool:
        return self._draw.random() < 0.5

    def observe(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafts <= self._lengths[-1]
        self.num_observed += num_drafts > 0

    def spent(self, seconds: float, draft_seconds: float, tokens: float) -> None:
        assert 0 <= draft_seconds <= seconds
        assert 1 <= tokens <= self._lengths[-1] + 1

    def forget(self, request_ids: Iterable[str]) -> None:
        """Nothing is kept."""


def decide_at_random(engine: Engine, seed: int) -> Policy:
    """Put a policy of dice in the place of the engine's."""
    policy = RandomPolicy(engine.resolved.table.draft_lengths, seed)
    engine.drafting.length.policy = policy
    return policy
