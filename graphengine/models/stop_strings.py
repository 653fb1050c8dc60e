"""Stop strings: where a text ends by one, and how much of it may yet turn out to be one.

Pure functions of text. Knows nothing of tokens or requests.
"""

from __future__ import annotations

from collections.abc import Sequence


def end_at_stop(text: str, stops: Sequence[str], *, include: bool, beyond: int = 0) -> int | None:
    """Characters of `text` to keep where a stop string is in it; None where none is.

    The match that starts first wins, of those the longest.

    Args:
        include: keep the match itself.
        beyond: only matches that end behind so many characters, those that were there before.
    """
    found = [(text.find(stop, max(0, beyond - len(stop) + 1)), -len(stop)) for stop in stops]
    start, minus_length = min((match for match in found if match[0] >= 0), default=(-1, 0))
    if start < 0:
        return None
    return start - minus_length if include else start


def num_held(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of `text` that must wait: the longest beginning of a stop string."""
    longest = min(len(text), max(map(len, stops), default=1) - 1)
    for length in range(longest, 0, -1):
        if any(len(stop) > length and stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
