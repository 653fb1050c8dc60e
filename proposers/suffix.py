"""suffix proposer: follows what most often came after the newest tokens (SuffixDecoding).

Owns one suffix tree for each request, over its prompt and output, and a shared one over outputs of
requests that are gone, bounded in tokens. Of the two paths the one with the better score is
drafted (Oliaro et al., arXiv 2411.04975). A draft is a function of the request's history
and of the calls before it, and of nothing else. See docs/proposers/suffix.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from proposers.base import NO_TOKEN, Commit, Draft, HostProposer, ProposeInputs, Runtime, TokenArray
from proposers.info import (
    OptionInfo,
    ProposerInfo,
    ProposerSpec,
    integers,
    numbers,
    option_error,
)
from proposers.suffix_tree import SuffixTree

_LARGEST_MATCH = 64
_SHORT_DRAFT = 3  # tokens that any match may draft: verifying them costs next to nothing
# By so much a match in other requests' text is taken to be shorter than it is: they are weaker
# evidence than the request's own, and one token alone is none.
_SHARED_DISCOUNT = 1


def _check_lengths(options: Mapping[str, object]) -> None:
    shortest = cast(int, options["min_match_length"])
    longest = cast(int, options["max_match_length"])
    if shortest > longest:
        allowed = f"an integer from 1 to {longest} (max_match_length)"
        raise option_error("suffix", "min_match_length", shortest, allowed)


INFO = ProposerInfo(
    name="suffix",
    summary="follows what most often came after the newest tokens, here and in earlier outputs",
    kind="host",
    longest_match=24,
    options=(
        OptionInfo(
            name="max_match_length",
            default=24,
            doc="longest suffix that is looked up, tokens",
            rule=integers(1, _LARGEST_MATCH),
        ),
        OptionInfo(
            name="min_match_length",
            default=1,
            doc="shortest suffix that may draft, tokens",
            rule=integers(1, _LARGEST_MATCH),
        ),
        OptionInfo(
            name="draft_factor",
            default=2.0,
            doc="a match of n tokens drafts at most max(3, draft_factor * n) tokens",
            rule=numbers(0, 64),
        ),
        OptionInfo(
            name="min_probability",
            default=0.1,
            doc="a draft ends before a token whose estimated probability is lower",
            rule=numbers(0, 1),
        ),
        OptionInfo(
            name="shared_tree_tokens",
            default=50_000,
            doc="outputs of earlier requests to learn from, tokens, whoever asked; 0: none",
            rule=integers(0, 2**24),
        ),
    ),
    check=_check_lengths,
)


@dataclass(frozen=True, slots=True)
class _Guess:
    """A path of a tree."""

    token_ids: list[int]
    score: float  # how many of them are expected to be accepted
    match_length: int


_NO_GUESS = _Guess([], 0.0, 0)


@dataclass(frozen=True, slots=True)
class _Request:
    """What is known of a request that has been drafted for."""

    tree: SuffixTree
    is_private: bool  # it has a cache salt, so that nothing of it reaches others
    output: list[int] = field(default_factory=list)  # verified since the first draft


class SuffixProposer(HostProposer):
    """Drafts by frequency in a request's own history and in outputs of earlier requests."""

    name = INFO.name

    def __init__(
        self,
        *,
        max_match_length: int = 24,
        min_match_length: int = 1,
        draft_factor: float = 2.0,
        min_probability: float = 0.1,
        shared_tree_tokens: int = 50_000,
    ) -> None:
        self._max_match_length = max_match_length
        self._min_match_length = min_match_length
        self._draft_factor = draft_factor
        self._min_probability = min_probability
        self._shared_tree_tokens = shared_tree_tokens
        self._requests: dict[str, _Request] = {}
        self._shared = SuffixTree(max_match_length)

    def propose(self, inputs: ProposeInputs) -> Draft:
        """Drafts [num_reqs, k]; a row without a match, or without an allowance, is empty."""
        salts = inputs.cache_salts or [None] * inputs.num_reqs
        guesses = [
            self._guess(self._follow(request_id, token_ids, salt), token_ids, allowance)
            if allowance
            else _NO_GUESS
            for request_id, token_ids, salt, allowance in zip(
                inputs.request_ids,
                inputs.token_ids,
                salts,
                inputs.num_draft_tokens.tolist(),
                strict=True,
            )
        ]
        return Draft.from_rows(
            [guess.token_ids for guess in guesses],
            inputs.k,
            match_lengths=[guess.match_length for guess in guesses],
        )

    def _follow(self, request_id: str, token_ids: TokenArray, salt: str | None) -> _Request:
        """The request, its tree brought up to its history [num_tokens]."""
        request = self._requests.get(request_id)
        # One memcmp tells a reused request id or a shortened history from a grown one, exactly.
        if request is None or not request.tree.is_start_of(token_ids):
            request = _Request(SuffixTree(self._max_match_length), is_private=salt is not None)
            self._requests[request_id] = request
        request.tree.append(token_ids[len(request.tree) :])
        return request

    def _guess(self, request: _Request, token_ids: TokenArray, allowance: int) -> _Guess:
        """The better of the paths in both trees; of equal ones the request's own."""
        best, trees = _NO_GUESS, [(request.tree, 0)]
        if not request.is_private:
            trees.append((self._shared, _SHARED_DISCOUNT))
        for tree, discount in trees:
            match_length, places = tree.find(token_ids)
            trusted = match_length - discount
            if trusted < self._min_match_length:
                continue
            limit = min(allowance, max(_SHORT_DRAFT, int(self._draft_factor * trusted)))
            path, score = tree.follow(places, limit, self._min_probability)
            if score > best.score:
                best = _Guess(path, score, match_length)
        return best

    def on_commit(self, commit: Commit) -> None:
        """Keep the output of requests that are drafted for, for the shared tree."""
        for request_id, token_ids in zip(commit.request_ids, commit.token_ids, strict=True):
            request = self._requests.get(request_id)
            if request is not None and not request.is_private:
                request.output.extend(token_ids)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Free the trees of these requests, and learn from what they have put out.

        Each verified token enters the shared tree at most once: a request that starts over comes
        back without an output, and what it adds then enters as a text of its own.
        """
        for request_id in request_ids:
            request = self._requests.pop(request_id, None)
            if request is not None and request.output:
                # NO_TOKEN keeps strings from going across two outputs
                self._shared.append(np.array([*request.output, NO_TOKEN], dtype=np.int32))
                self._shared.keep_newest(self._shared_tree_tokens)


def build(options: Mapping[str, object], runtime: Runtime) -> SuffixProposer:
    """A SuffixProposer from resolved options."""
    return SuffixProposer(
        max_match_length=cast(int, options["max_match_length"]),
        min_match_length=cast(int, options["min_match_length"]),
        draft_factor=cast(float, options["draft_factor"]),
        min_probability=cast(float, options["min_probability"]),
        shared_tree_tokens=cast(int, options["shared_tree_tokens"]),
    )


SPEC = ProposerSpec(info=INFO, factory=build)
