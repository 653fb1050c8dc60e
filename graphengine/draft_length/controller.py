"""DraftLength: the engine's side of the policy that says how many drafts a step carries.

Owns the user's own limit, which goes before any policy, the allowances of requests, and what the
policy is told: what became of drafts, verified or judged in hindsight, and what steps cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from graphengine.checks import check_integer
from graphengine.draft_length.hindsight import Hindsight
from graphengine.draft_length.policy import Batch, FixedLength, Policy
from graphengine.model_runner import tier_of
from graphengine.request import Request
from graphengine.sampled import Sampled
from proposers.base import NO_TOKEN, Draft
from proposers.device_draft import DeviceDraft


class DraftLength:
    """See the module docstring.

    Args:
        policy: decides.
        lengths: captured draft lengths, ascending, 0 first.
    """

    def __init__(self, policy: Policy, lengths: Sequence[int]) -> None:
        self.policy = policy
        self._lengths = tuple(lengths)
        self._limit = self._lengths[-1]
        self._hindsight = Hindsight()
        self._tokens = 0.0  # that the last step has brought a request
        self.longest = 0  # of the step being made

    @property
    def limit(self) -> int:
        """Most drafts of a step, as the user has set it."""
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        check_integer("draft_limit", limit, 0, self.most)
        self._limit = limit

    def ladder(self, running: Iterable[Request]) -> list[int]:
        """Draft lengths that the next step may use, ascending, 0 first.

        Writes the allowance of every request that may be in it.
        """
        requests = [one for one in running if one.is_decode_ready and one.may_step]
        self.longest = 0
        if self._limit:
            batch = _batch(requests)  # empty where those that will step are still to be let in
            self.longest = min(self.policy.longest(batch), self._limit)
            allowances = self.policy.allowances(batch, self.longest)
            for request, allowance in zip(requests, allowances, strict=True):
                request.draft_limit = allowance
        return [k for k in self._lengths if k <= self.longest]

    @property
    def listens(self) -> bool:
        """Whether to ask for drafts that the step being made will not verify."""
        return self._limit > 0 and self.longest == 0 and self.policy.may_listen()

    @property
    def most(self) -> int:
        """Longest draft of any step, whatever the limits now."""
        return self._lengths[-1]

    def cut(self, requests: Sequence[Request], draft: Draft) -> Draft:
        """What of a draft is worth verifying; of all of it, time will tell what it was worth."""
        if isinstance(draft, DeviceDraft):
            return draft
        self.expect(requests, draft)
        before = draft.num_draft_tokens.tolist()
        after = self.policy.worthwhile(_batch(requests), before)
        if after == before:
            return draft
        counts = np.array(after, dtype=np.int32)
        kept = np.arange(draft.token_ids.shape[1]) < counts[:, None]
        token_ids = np.where(kept, draft.token_ids, np.int32(NO_TOKEN))
        return replace(draft, token_ids=token_ids, num_draft_tokens=counts)

    def expect(self, requests: Sequence[Request], draft: Draft) -> None:
        """Remember a draft for hindsight, verified or not."""
        if draft.probs is not None:
            return  # accepted by chance: what then comes says little of it
        rows = zip(requests, draft.token_ids, draft.num_draft_tokens.tolist(), strict=True)
        for request, token_ids, count in rows:
            if count:
                self._hindsight.expect(request.request_id, token_ids[:count].tolist())

    def committed(self, sampled: Sequence[Sampled]) -> None:
        """Judge drafts by what a step has brought."""
        if sampled:
            self._tokens = sum(len(item.token_ids) for item in sampled) / len(sampled)
        for item in sampled:
            request = item.decode.request
            if request.is_finished:
                continue  # what a stop cut off is no sign of a bad draft
            judged = self._hindsight.judge(request.request_id, item.token_ids)
            if judged is None:
                judged = [(item.num_draft_tokens, item.num_accepted)]
            for num_drafts, num_accepted in judged:
                self.policy.observe(request.request_id, num_drafts, num_accepted)

    def spent(self, seconds: float, draft_seconds: float) -> None:
        """What the last step has cost, drafting included, and drafting alone."""
        if self._tokens:
            self.policy.spent(seconds, draft_seconds, self._tokens)
        self._tokens = 0.0

    def close(self) -> None:
        """Drop the policy, and the cells whose times it knows."""
        self.policy = FixedLength(0)

    def forget(self, request_ids: Sequence[str]) -> None:
        """These are gone, or start over."""
        self._hindsight.forget(request_ids)
        self.policy.forget(request_ids)


def _batch(requests: Sequence[Request]) -> Batch:
    return Batch([request.request_id for request in requests], tier_of(requests))
