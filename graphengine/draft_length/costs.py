"""What a step costs by number of requests and drafts, as measured when its cells were captured.

Owns the sums over a step's cells: those of the target, and those of a captured chain of drafts.
Only ratios matter to who reads it, so that a machine that is slow for a while misleads nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from capture.manager import CaptureManager
from graphengine.resolve import CUSTOM, LOGITS


class Costs(Protocol):
    """Seconds of steps."""

    def seconds(self, num_reqs: int, lengths: Sequence[int], tier: str) -> list[float]:
        """Of steps of `num_reqs` requests with drafts of each of these lengths, drafting included
        where it is captured.

        Args:
            lengths: captured draft lengths.
            tier: of the target's cells.
        """
        ...


class CellCosts:
    """Costs by the times of captured cells.

    Args:
        manager: of the engine; a lazy one captures and times cells when they are first asked for.
    """

    def __init__(self, manager: CaptureManager) -> None:
        self._manager = manager
        self._known: dict[tuple[int, int, str], float] = {}

    def seconds(self, num_reqs: int, lengths: Sequence[int], tier: str) -> list[float]:
        return [self._seconds(num_reqs, length, tier) for length in lengths]

    def _seconds(self, num_reqs: int, length: int, tier: str) -> float:
        asked = (num_reqs, length, tier)
        if asked not in self._known:
            manager, tiers = self._manager, (LOGITS, CUSTOM) if tier == CUSTOM else (tier,)
            keys = [manager.dispatch(num_reqs, length, one) for one in tiers]
            verify = sum(map(manager.replay_seconds, keys))
            self._known[asked] = verify + manager.draft_seconds(num_reqs, length)
        return self._known[asked]
