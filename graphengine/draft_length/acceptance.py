"""Acceptance by place: how often a draft is accepted, given that those before it were.

Owns the counts, discounted so that the newest weigh most, and what they are taken to mean where few
are known. Knows nothing of requests, steps or time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

FIRST_GUESS: Final = 0.7  # acceptance of a first draft before one was judged


class Acceptance:
    """Counts of judged drafts by place.

    Args:
        num_places: longest draft.
        window: observations after which one counts 1/e of a new one.
    """

    __slots__ = ("_keep", "accepted", "judged")

    def __init__(self, num_places: int, window: int) -> None:
        # by place: drafts that were judged there, all before them having been accepted
        self.judged = [0.0] * num_places
        self.accepted = [0.0] * num_places
        self._keep = 1.0 - 1.0 / window

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """One step's drafts, the first `num_accepted` of which were accepted.

        Every place fades, those that it did not reach, too: what is known of them ages.
        """
        assert 0 <= num_accepted <= num_drafts <= len(self.judged), (
            f"{num_accepted} of {num_drafts} drafts accepted, {len(self.judged)} places"
        )
        if num_drafts == 0:
            return
        keep = self._keep
        for place in range(len(self.judged)):
            self.judged[place] *= keep
            self.accepted[place] *= keep
        for place in range(num_accepted):
            self.judged[place] += 1.0
            self.accepted[place] += 1.0
        if num_accepted < num_drafts:
            self.judged[num_accepted] += 1.0

    def rates(self, guesses: Sequence[float] | None, weight: float) -> list[float]:
        """Estimated acceptance of each place.

        Args:
            guesses: of the same places, worth `weight` observations each; None: of the first
                `FIRST_GUESS`, and of each other one the estimate of the place before it.
        """
        found: list[float] = []
        before = FIRST_GUESS
        for place, judged in enumerate(self.judged):
            guess = before if guesses is None else guesses[place]
            before = (self.accepted[place] + weight * guess) / (judged + weight)
            found.append(before)
        return found


def expected_tokens(rates: Sequence[float]) -> list[float]:
    """Tokens that a step is expected to emit for a request by number of drafts, [k + 1]: 1 with
    none, and with each one more the chance that it and all before it are accepted (Leviathan et al.
    2023, eq. 1, with an acceptance rate a place).
    """
    found, chance = [1.0], 1.0
    for rate in rates:
        chance *= rate
        found.append(found[-1] + chance)
    return found
