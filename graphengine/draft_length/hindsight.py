"""Hindsight: what would have become of drafts, judged by the tokens that then came.

Owns drafts that wait to be judged. Verified or not, a draft of the host's is accepted as far as it
equals what the request goes on with (Leviathan et al. 2023 with a one-hot distribution; for drafts
with a distribution of their own this does not hold). So a step without a verified draft still
teaches what one would have brought.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Waiting:
    token_ids: Sequence[int]  # of the draft
    num_seen: int = 0  # leading ones that have come true

    def is_decided_by(self, token_ids: Sequence[int]) -> bool:
        """Go on by what has come; whether that was the end, one way or the other."""
        for token in token_ids:
            if self.num_seen == len(self.token_ids) or self.token_ids[self.num_seen] != token:
                return True
            self.num_seen += 1
        return self.num_seen == len(self.token_ids)


class Hindsight:
    """See the module docstring."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[_Waiting]] = {}  # by request, oldest first

    def expect(self, request_id: str, token_ids: Sequence[int]) -> None:
        """A draft of what comes next; of at least one token."""
        self._waiting.setdefault(request_id, []).append(_Waiting(token_ids))

    def judge(self, request_id: str, token_ids: Sequence[int]) -> list[tuple[int, int]] | None:
        """What has come: (drafts, accepted) of each draft that is decided by it.

        None where no draft of the request waited.
        """
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return None
        undecided = [one for one in waiting if not one.is_decided_by(token_ids)]
        if undecided:
            self._waiting[request_id] = undecided
        return [(len(one.token_ids), one.num_seen) for one in waiting if one not in undecided]

    def forget(self, request_ids: Iterable[str]) -> None:
        """These are gone: nobody will know."""
        for request_id in request_ids:
            self._waiting.pop(request_id, None)
