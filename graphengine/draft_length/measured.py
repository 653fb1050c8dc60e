"""MeasuredLength: the draft length with the most expected tokens a second, from measurement alone.

Owns the choice between captured lengths: expected tokens by acceptance so far (`acceptance.py`)
over what their cells cost (`costs.py`), off included. And owns the budget for finding out whether
drafts would pay again while they are off. A function of what it was told: no clock, no tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import mul
from typing import Final

from graphengine.draft_length.acceptance import Acceptance, expected_tokens
from graphengine.draft_length.costs import Costs
from graphengine.draft_length.policy import Batch

REQUEST_WINDOW: Final = 32  # drafts of one request
OVERALL_WINDOW: Final = 256  # drafts of all
OVERALL_WEIGHT: Final = 4.0  # of what all do, in drafts of a request's own
GUESS_WEIGHT: Final = 2.0  # of the first guess, in drafts of all
MARGIN: Final = 1.015  # a longer draft must promise so much more than the length in use
LEAST_CHANCE: Final = 0.1  # of acceptance: drafts below it are left out
PROBE_SHARE: Final = 0.005  # of the time without drafts may be spent on looking for them
MOST_SAVED: Final = 2.0  # plain steps' worth of that time that may be saved up
MOST_OWED: Final = 64.0  # and that a probe may have cost too much
BEST_RATE: Final = 0.9  # of acceptance: where not even that pays, nobody probes


class MeasuredLength:
    """See the module docstring.

    Args:
        costs: of the engine's steps.
        lengths: captured draft lengths, ascending, 0 first.
        listens: whether a proposer of the host can be asked beside the step, without a verify step:
            then nothing else is tried while drafts are off.
    """

    def __init__(self, costs: Costs, lengths: Sequence[int], *, listens: bool) -> None:
        self._costs = costs
        self._lengths = tuple(lengths)
        self._listens = listens
        self._all = Acceptance(self._lengths[-1], OVERALL_WINDOW)
        self._requests: dict[str, Acceptance] = {}
        self._in_use: dict[int, int] = {}  # length by number of requests
        self._is_off = self._is_probe = False  # of the step being made
        self._saved = 0.0  # seconds that may be spent on looking
        self._plain_seconds = 0.0  # of the last step without drafts
        self._num_probed = 0  # requests in the last probe, if it is to be followed up at once
        self._num_reqs = 0  # of the step being made
        self._price = 1.0  # of a probe, in plain steps
        self._turn = 0  # whose it is to be the first of them

    def longest(self, batch: Batch) -> int:
        """Longest draft of the next step: the best, or a probe while that is none."""
        num_reqs, lengths = batch.num_reqs, self._lengths
        self._is_off = self._is_probe = False
        if num_reqs == 0:
            return lengths[-1]
        speeds = self._speeds(batch, [lengths[-1]] * num_reqs, lengths)
        best = speeds.index(max(speeds))
        last = self._in_use.get(num_reqs, best)
        if best > last and speeds[best] < MARGIN * speeds[last]:
            best = last
        self._in_use[num_reqs] = best
        self._is_off = best == 0
        self._is_probe = self._is_off and not self._listens and self._may_probe(batch)
        return lengths[1] if self._is_probe else lengths[best]

    def _may_probe(self, batch: Batch) -> bool:
        """Whether there is time for a probe, and the best that it may find would pay."""
        if self._saved <= 0 and self._num_probed == 0:
            return False
        self._num_reqs = batch.num_reqs
        seconds = self._costs.seconds(batch.num_reqs, self._lengths, batch.tier)
        prices = [one / seconds[0] for one in seconds]
        self._price = prices[1]
        tokens = expected_tokens([BEST_RATE] * self._lengths[-1])
        return any(tokens[k] > price for k, price in zip(self._lengths, prices, strict=True))

    def allowances(self, batch: Batch, longest: int) -> list[int]:
        """Drafts that have a chance; always the first, which costs nothing and tells something."""
        if self._is_probe:
            first, num_reqs = self._turn, batch.num_reqs
            places = [(place - first) % num_reqs for place in range(num_reqs)]
            return [longest if place < max(1, self._num_probed) else 0 for place in places]
        overall = self._overall()
        return [self._promising(self._rates(one, overall), longest) for one in batch.request_ids]

    def worthwhile(self, batch: Batch, lengths: Sequence[int]) -> list[int]:
        """The drafts cut to the length at which the step emits most a second."""
        longest = max(lengths, default=0)
        if longest == 0:
            return list(lengths)
        choices = self._lengths[: bisect_left(self._lengths, longest) + 1]
        speeds = self._speeds(batch, lengths, choices)
        best = choices[speeds.index(max(speeds))]
        return [min(length, best) for length in lengths]

    def may_listen(self) -> bool:
        """Whether a step without drafts has time to spare for what they would have been."""
        return self._listens and self._saved > 0

    def observe(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        """What became of a request's drafts."""
        if request_id not in self._requests:
            self._requests[request_id] = Acceptance(self._lengths[-1], REQUEST_WINDOW)
        self._requests[request_id].observe(num_drafts, num_accepted)
        self._all.observe(num_drafts, num_accepted)

    def spent(self, seconds: float, draft_seconds: float, tokens: float) -> None:
        """What the step has cost: a plain one earns time to look for drafts, a look spends it.

        A probe pays for itself where it emits more than plain steps would have in its time, and
        then another one follows it at once.
        """
        if not self._is_off:
            return
        if self._is_probe:
            earned = self._plain_seconds * tokens - seconds
            num_probed = max(1, self._num_probed)
            self._turn += num_probed
            # Catching up with what was missed is in its seconds, and comes once.
            goes_on = tokens > (1.0 if num_probed < self._num_reqs else self._price)
            self._num_probed = min(2 * num_probed, self._num_reqs) if goes_on else 0
        else:
            self._plain_seconds = seconds - draft_seconds
            earned = PROBE_SHARE * self._plain_seconds - draft_seconds
        least, most = -MOST_OWED * self._plain_seconds, MOST_SAVED * self._plain_seconds
        self._saved = max(least, min(self._saved + earned, most))

    def forget(self, request_ids: Iterable[str]) -> None:
        """These are gone; what they told of all others stays."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def _rates(self, request_id: str, overall: Sequence[float]) -> list[float]:
        known = self._requests.get(request_id)
        return list(overall) if known is None else known.rates(overall, OVERALL_WEIGHT)

    def _promising(self, rates: Sequence[float], longest: int) -> int:
        """How many drafts have a chance, the first in any case."""
        chances: list[float] = list(accumulate(rates[:longest], mul))
        return max(sum(chance >= LEAST_CHANCE for chance in chances), min(1, longest))

    def _overall(self) -> list[float]:
        return self._all.rates(None, GUESS_WEIGHT)

    def _speeds(self, batch: Batch, lengths: Sequence[int], choices: Sequence[int]) -> list[float]:
        """Expected tokens a second, were the drafts [num_reqs] cut to each of the choices."""
        overall = self._overall()
        tokens = [expected_tokens(self._rates(one, overall)) for one in batch.request_ids]
        seconds = self._costs.seconds(batch.num_reqs, choices, batch.tier)
        return [
            sum(one[min(length, choice)] for one, length in zip(tokens, lengths, strict=True))
            / cost
            for choice, cost in zip(choices, seconds, strict=True)
        ]
