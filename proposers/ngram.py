"""n-gram proposer: repeats what followed the last occurrence of the newest tokens (prompt lookup).

Owns one incremental index for each request, from every n-gram of its history to where the most
recent continuation starts. Needs no model and no notice of commits: the history handed to propose
is its only source, and its drafts are a function of that history alone. See
docs/proposers/ngram.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from proposers.base import Draft, HostProposer, ProposeInputs, Runtime, TokenArray
from proposers.info import (
    BOOLEAN,
    OptionInfo,
    ProposerInfo,
    ProposerSpec,
    integers,
    option_error,
)

_LARGEST_NGRAM_SIZE = 64
_SHORT_DRAFT = 3  # tokens that any match may draft: verifying them costs next to nothing
_TOKEN_BYTES = np.dtype(np.int32).itemsize


def _check_sizes(options: Mapping[str, object]) -> None:
    smallest = cast(int, options["min_ngram_size"])
    largest = cast(int, options["max_ngram_size"])
    if smallest > largest:
        allowed = f"an integer from 1 to {largest} (max_ngram_size)"
        raise option_error("ngram", "min_ngram_size", smallest, allowed)


INFO = ProposerInfo(
    name="ngram",
    summary="copies what followed the longest, then most recent, match of the newest tokens",
    kind="host",
    longest_match=5,
    options=(
        OptionInfo(
            name="max_ngram_size",
            default=5,
            doc="longest suffix that is looked up, tokens",
            rule=integers(1, _LARGEST_NGRAM_SIZE),
        ),
        OptionInfo(
            name="min_ngram_size",
            default=1,
            doc="shortest suffix that may draft, tokens",
            rule=integers(1, _LARGEST_NGRAM_SIZE),
        ),
        OptionInfo(
            name="limit_by_match",
            default=True,
            doc="draft at most max(3, 2 * match - 1) tokens from a match below max_ngram_size",
            rule=BOOLEAN,
        ),
    ),
    check=_check_sizes,
)


class NgramIndex:
    """Where each n-gram of one history, n in [min_size, max_size], last had a continuation.

    A growing history costs one write for each new token and size; num_writes counts them.
    """

    __slots__ = ("_history", "_min_size", "_max_size", "_starts", "num_writes")

    def __init__(self, min_size: int, max_size: int) -> None:
        self._min_size = min_size
        self._max_size = max_size
        # bytes of the indexed tokens, kept to notice a history that is not a continuation of them
        self._history = bytearray()
        # bytes of an n-gram -> index of the token after its last occurrence; sizes cannot collide,
        # since keys of different sizes have different lengths
        self._starts: dict[bytes, int] = {}
        self.num_writes = 0

    def __len__(self) -> int:
        return len(self._starts)

    def update(self, token_ids: TokenArray) -> None:
        """Bring the index up to a history [num_tokens].

        A history that does not continue the last one is indexed from scratch.
        """
        # The last token is left out: the n-grams that end in it have no continuation yet.
        num_indexed, num_tokens = len(self._history) // _TOKEN_BYTES, len(token_ids) - 1
        # One memcmp tells a reused request id or a shortened history from a grown one, exactly.
        if num_indexed > num_tokens or self._history != token_ids[:num_indexed].tobytes():
            self._history.clear()
            self._starts.clear()
            num_indexed = 0
        if num_indexed < num_tokens:
            self._add(token_ids, num_indexed, num_tokens)

    def _add(self, token_ids: TokenArray, first: int, last: int) -> None:
        """Index the n-grams that end in tokens [first, last)."""
        origin = max(0, first - self._max_size + 1)
        window = token_ids[origin:last].tobytes()
        starts, min_size, max_size = self._starts, self._min_size, self._max_size
        for end in range(first + 1, last + 1):
            stop = (end - origin) * _TOKEN_BYTES
            for size in range(min_size, min(max_size, end) + 1):
                starts[window[stop - size * _TOKEN_BYTES : stop]] = end
            self.num_writes += max(0, min(max_size, end) - min_size + 1)
        self._history += window[(first - origin) * _TOKEN_BYTES :]

    def find(self, token_ids: TokenArray) -> tuple[int, int]:
        """Size of the longest matching suffix and start of its latest continuation, or (0, 0)."""
        tail = token_ids[-self._max_size :].tobytes()
        found = (0, 0)
        # A suffix that occurred before contains every shorter one, so climb until the first miss.
        for size in range(self._min_size, min(self._max_size, len(token_ids)) + 1):
            start = self._starts.get(tail[len(tail) - size * _TOKEN_BYTES :])
            if start is None:
                break
            found = (size, start)
        return found


def continue_from(token_ids: TokenArray, start: int, num_tokens: int) -> TokenArray:
    """num_tokens tokens from start on; where the history ends, the copy goes on into itself.

    So a history that has begun to repeat with period len(token_ids) - start keeps that period for
    any num_tokens.
    """
    known = token_ids[start : start + num_tokens]
    return known if len(known) == num_tokens else np.resize(known, num_tokens)


class NgramProposer(HostProposer):
    """Drafts by prompt lookup in each request's own history, prompt included."""

    name = INFO.name

    def __init__(
        self, *, min_ngram_size: int = 1, max_ngram_size: int = 5, limit_by_match: bool = True
    ) -> None:
        assert 1 <= min_ngram_size <= max_ngram_size, "n-gram sizes are 1 <= min <= max"
        self._min_size = min_ngram_size
        self._max_size = max_ngram_size
        self._limit_by_match = limit_by_match
        self._indexes: dict[str, NgramIndex] = {}

    def propose(self, inputs: ProposeInputs) -> Draft:
        """Drafts [num_reqs, k]; a row without a match, or without an allowance, is empty."""
        rows: list[TokenArray] = []
        sizes: list[int] = []
        for request_id, token_ids, allowance in zip(
            inputs.request_ids, inputs.token_ids, inputs.num_draft_tokens.tolist(), strict=True
        ):
            size, start = self._find(request_id, token_ids) if allowance else (0, 0)
            num_tokens = self._num_draft_tokens(size, allowance)
            rows.append(continue_from(token_ids, start, num_tokens))
            sizes.append(size)
        return Draft.from_rows(rows, inputs.k, match_lengths=sizes)

    def _find(self, request_id: str, token_ids: TokenArray) -> tuple[int, int]:
        """What `NgramIndex.find` says of a history [num_tokens], indexed first."""
        index = self._indexes.get(request_id)
        if index is None:
            index = self._indexes[request_id] = NgramIndex(self._min_size, self._max_size)
        index.update(token_ids)
        return index.find(token_ids)

    def _num_draft_tokens(self, size: int, allowance: int) -> int:
        """How many drafts a match of this size deserves; 0 for no match."""
        # A match of the largest size may be longer than was looked for, so it is trusted fully.
        if size == 0:
            return 0
        if size == self._max_size or not self._limit_by_match:
            return allowance
        return min(allowance, max(_SHORT_DRAFT, 2 * size - 1))

    def forget(self, request_ids: Sequence[str]) -> None:
        """Free the indexes of these requests."""
        for request_id in request_ids:
            self._indexes.pop(request_id, None)


def build(options: Mapping[str, object], runtime: Runtime) -> NgramProposer:
    """An NgramProposer from resolved options."""
    return NgramProposer(
        min_ngram_size=cast(int, options["min_ngram_size"]),
        max_ngram_size=cast(int, options["max_ngram_size"]),
        limit_by_match=cast(bool, options["limit_by_match"]),
    )


SPEC = ProposerSpec(info=INFO, factory=build)
