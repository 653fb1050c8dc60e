"""Suffix tree of a text of token ids: how often each token has followed each string of it.

A node is the list of places where its string has ended, its count their number, and a child those
of them where one more token follows. Only the nodes of one and two tokens are kept; deeper ones are
read off the text. So a token costs two entries, whatever the depth, and the oldest can be dropped.
Knows nothing of requests.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from proposers.base import NO_TOKEN, TokenArray

Places = npt.NDArray[np.int64]

_TOKEN_BYTES = np.dtype(np.int32).itemsize
_KEY_SIZES = (2, 1)  # tokens, the longest first
_MAX_PLACES = 256  # of more the newest count: a bound of what a look-up costs
_NOWHERE = np.empty(0, dtype=np.int64)


class SuffixTree:
    """Strings of up to max_match tokens, and what has followed them.

    The text may hold NO_TOKEN: no string goes across it, and nothing follows a string before it.
    """

    __slots__ = ("_first", "_max_match", "_places", "_text", "num_writes")

    def __init__(self, max_match: int) -> None:
        self._max_match = max_match
        # int32 token ids, without the _first tokens that were dropped
        self._text = bytearray()
        self._first = 0
        # bytes of a string -> where it has ended: numbers of the tokens behind it, ascending.
        # Strings of different sizes cannot collide, since their keys have different lengths.
        self._places: dict[bytes, list[int]] = {}
        self.num_writes = 0

    def __len__(self) -> int:
        """Tokens in the text."""
        return len(self._text) // _TOKEN_BYTES

    @property
    def num_places(self) -> int:
        """Entries that are kept."""
        return sum(map(len, self._places.values()))

    def is_start_of(self, token_ids: TokenArray) -> bool:
        """Whether token_ids `[num_tokens]` goes on from this text."""
        return self._text == token_ids[: len(self)].tobytes()

    def append(self, token_ids: TokenArray) -> None:
        """Add tokens `[num_tokens]`, int32. Strings that end in the newest have no place yet."""
        start = max(1, len(self))
        self._text += token_ids.tobytes()
        stop = len(self)
        for size in _KEY_SIZES:
            for place in range(max(start, size), stop):
                self._places.setdefault(self._key(place, size), []).append(self._first + place)
            self.num_writes += max(0, stop - max(start, size))

    def keep_newest(self, num_tokens: int) -> None:
        """Drop the oldest tokens until no more than num_tokens are left."""
        excess = len(self) - num_tokens
        if excess <= 0:
            return
        for size in _KEY_SIZES:  # the strings that begin in what goes
            for place in range(size, min(excess + size, len(self))):
                key = self._key(place, size)
                del self._places[key][0]
                if not self._places[key]:
                    del self._places[key]
        del self._text[: excess * _TOKEN_BYTES]
        self._first += excess

    def _key(self, place: int, size: int) -> bytes:
        return bytes(self._text[(place - size) * _TOKEN_BYTES : place * _TOKEN_BYTES])

    def find(self, token_ids: TokenArray) -> tuple[int, Places]:
        """Size of the longest suffix of token_ids `[num_tokens]` that has a place, and its places.

        (0, none) where not even the last token has one. At most the newest 256 places are looked
        at, of the last two tokens or, where the two never came together, of the last.
        """
        newest_first = token_ids[: -self._max_match - 1 : -1]
        for size in _KEY_SIZES:
            found = self._places.get(token_ids[-size:].tobytes())
            if found is not None and size <= len(newest_first):
                break
        else:
            return 0, _NOWHERE
        places = np.array(found[-_MAX_PLACES:], dtype=np.int64) - self._first
        text = np.frombuffer(self._text, dtype=np.int32)
        # [num_places, match]
        before = places[:, None] - np.arange(1, len(newest_first) + 1)
        same = (text[np.maximum(before, 0)] == newest_first) & (before >= 0)
        sizes = np.logical_and.accumulate(same, axis=1).sum(axis=1)
        longest = int(sizes.max())
        return longest, places[sizes == longest]

    def follow(
        self, places: Places, num_tokens: int, min_probability: float
    ) -> tuple[list[int], float]:
        """The path from a node that takes the likeliest child at each step, and its score.

        A token's probability is the share of the places `[num_places]` that have gone along the
        path up to it: the product of count / parent's count. Of equal children the one that came
        last is taken. Where the text ends, a place goes on into what followed it, as a text that
        has begun to repeat does.

        Args:
            num_tokens: longest path.
            min_probability: the path ends before a token that has less.

        Returns:
            Token ids, and the sum of their probabilities: how many are expected to be right.
        """
        text = np.frombuffer(self._text, dtype=np.int32)
        # [num_places, num_tokens], the newest place first
        ahead = places[::-1, None] + np.arange(num_tokens) % (len(text) - places[::-1, None])
        rows: list[list[int]] = text[ahead].tolist()
        path: list[int] = []
        score = 0.0
        for depth in range(num_tokens):
            counts: dict[int, int] = {}
            for row in rows:
                counts[row[depth]] = counts.get(row[depth], 0) + 1
            counts.pop(NO_TOKEN, None)
            likeliest = max(counts, key=counts.__getitem__, default=NO_TOKEN)
            probability = counts.get(likeliest, 0) / len(places)
            if likeliest == NO_TOKEN or probability < min_probability:
                break
            path.append(likeliest)
            score += probability
            rows = [row for row in rows if row[depth] == likeliest]
        return path, score
