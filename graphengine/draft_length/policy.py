"""What decides how many drafts a step carries, and the rules that need no measurement.

A policy is told who is in the next step, and later what became of their drafts. It says the longest
draft that the step may have, then, once drafts are known, how many of each are worth verifying. It
never sees a token: what it decides can change the speed of a stream and nothing else. (With
`verification="rejection"` it decides before the tokens in question are judged.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

LOW_ACCEPTANCE: Final = 0.4  # of `Threshold`
RULE_WINDOW: Final = 64  # steps over which it is averaged


@dataclass(frozen=True, slots=True)
class Batch:
    """Who is to be in a step."""

    request_ids: Sequence[str]
    tier: str  # of the cells that would serve it

    @property
    def num_reqs(self) -> int:
        return len(self.request_ids)


class Policy(Protocol):
    """See the module docstring."""

    def longest(self, batch: Batch) -> int:
        """Longest draft of the next step, a captured length; 0: no drafts."""
        ...

    def allowances(self, batch: Batch, longest: int) -> list[int]:
        """How many drafts each may have of a step of that length, [num_reqs]."""
        ...

    def worthwhile(self, batch: Batch, lengths: Sequence[int]) -> list[int]:
        """How many of its drafts are worth verifying for each, where there are `lengths`."""
        ...

    def may_listen(self) -> bool:
        """Whether to ask the host's proposer in a step without drafts, to learn how it would do."""
        ...

    def observe(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        """A draft of a request: the first `num_accepted` of `num_drafts` are accepted."""
        ...

    def spent(self, seconds: float, draft_seconds: float, tokens: float) -> None:
        """What the last step has cost, drafting included, what drafting alone, and how many tokens
        it has emitted for each request."""
        ...

    def forget(self, request_ids: Iterable[str]) -> None:
        """These are gone."""
        ...


class Rule:
    """Base of policies that look at no clock and verify every draft that they allowed."""

    def allowances(self, batch: Batch, longest: int) -> list[int]:
        return [longest] * batch.num_reqs

    def worthwhile(self, batch: Batch, lengths: Sequence[int]) -> list[int]:
        return list(lengths)

    def may_listen(self) -> bool:
        return False

    def observe(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        """Nothing to learn."""

    def spent(self, seconds: float, draft_seconds: float, tokens: float) -> None:
        """Nothing to account for."""

    def forget(self, request_ids: Iterable[str]) -> None:
        """Nothing is kept."""


class FixedLength(Rule):
    """The same k for every step."""

    def __init__(self, k: int) -> None:
        self._k = k

    def longest(self, batch: Batch) -> int:
        return self._k


class LengthByBatch(Rule):
    """k by number of requests: {1: 6, 4: 3, 9: 0} is 6 for up to 3 requests, 3 for up to 8, else 0.

    Args:
        lengths: by the least number of requests, 1 among them; captured lengths.
    """

    def __init__(self, lengths: Mapping[int, int]) -> None:
        self._sizes = sorted(lengths)
        self._lengths = [lengths[size] for size in self._sizes]

    def longest(self, batch: Batch) -> int:
        place = bisect_right(self._sizes, max(1, batch.num_reqs)) - 1
        return self._lengths[place]


class Threshold(Rule):
    """The full k, or a short one while the moving average of acceptance is under 40 %.

    Args:
        k: captured length.
        short: captured length, less than k where there is one.
    """

    def __init__(self, k: int, short: int) -> None:
        self._k, self._short = k, short
        self._judged = self._accepted = 0.0

    def longest(self, batch: Batch) -> int:
        is_low = self._judged > 0 and self._accepted < LOW_ACCEPTANCE * self._judged
        return self._short if is_low else self._k

    def observe(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        keep = 1.0 - 1.0 / RULE_WINDOW
        self._judged = keep * self._judged + num_drafts
        self._accepted = keep * self._accepted + num_accepted
