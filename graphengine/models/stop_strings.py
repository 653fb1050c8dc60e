"""Stop strings: where a text ends by one, and how much of it may yet turn out to be one.

Pure functions of text. Knows nothing of tokens or requests.
"""

from __future__ import annotations

from collections.abc import Sequence


def end_at_stop(text: str, stops: Sequence[str], *, include: bool) -> int | None:
    """Characters of `text` to keep where a stop string is in it; None where none is.

    The match that starts first wins, of those the longest; `include` keeps the match itself.
    """
    matches = [(text.find(stop), -len(stop)) for stop in stops if stop in text]
    if not matches:
        return None
    start, minus_length = min(matches)
    return start - minus_length if include else start


def num_held(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of `text` that must wait: the longest beginning of a stop string.

    A text that holds a whole stop string is not for here.
    """
    longest = min(len(text), max(map(len, stops), default=1) - 1)
    for length in range(longest, 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
