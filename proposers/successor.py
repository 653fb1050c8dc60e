"""successor: drafts, one after the other, what last followed the newest two tokens.

Owns a table of pairs for each request, over its whole history, and a bounded one over outputs of
requests that are gone, for pairs that a request has not had itself. Both cost one write a token and
one or two look-ups a draft, whatever the history. A draft is a function of the request's history
and of the requests that were gone before. See docs/proposers/successor.md.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from proposers.base import Commit, Draft, HostProposer, ProposeInputs, Runtime, TokenArray
from proposers.info import OptionInfo, ProposerInfo, ProposerSpec, integers

INFO = ProposerInfo(
    name="successor",
    summary="what last followed the newest two tokens, here or else in earlier outputs",
    kind="host",
    options=(
        OptionInfo(
            name="max_length",
            default=3,
            doc="most tokens of a draft: two tokens are weak evidence",
            rule=integers(1, 64),
        ),
        OptionInfo(
            name="shared_pairs",
            default=65_536,
            doc="pairs to keep of outputs of earlier requests, whoever asked; 0: none",
            rule=integers(0, 2**24),
        ),
    ),
)


class PairTable:
    """What last followed each pair of tokens; of more than `most` pairs the oldest are dropped."""

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._next: OrderedDict[tuple[int, int], int] = OrderedDict()  # what is oldest first

    def learn(self, tokens: Sequence[int]) -> None:
        """Every token of a text [num_tokens] but the first two has followed a pair."""
        for first, second, third in zip(tokens, tokens[1:], tokens[2:], strict=False):
            self._next[first, second] = third
            self._next.move_to_end((first, second))
            if self._most is not None and len(self._next) > self._most:
                self._next.popitem(last=False)

    def get(self, first: int, second: int) -> int | None:
        """The token that followed, if one has."""
        return self._next.get((first, second))


@dataclass(slots=True)
class _Request:
    """What is known of a request that has been drafted for."""

    is_private: bool  # it has a cache salt: it neither learns from others nor teaches them
    pairs: PairTable = field(default_factory=PairTable)
    history: bytes = b""  # of the tokens that are in `pairs`
    output: list[int] = field(default_factory=list)  # verified since the first draft


class SuccessorProposer(HostProposer):
    """See the module docstring."""

    name = INFO.name

    def __init__(self, *, max_length: int = 3, shared_pairs: int = 65_536) -> None:
        self._max_length = max_length
        self._shared = PairTable(shared_pairs)
        self._requests: dict[str, _Request] = {}

    def propose(self, inputs: ProposeInputs) -> Draft:
        """Drafts [num_reqs, k]; a row ends before a pair that nothing is known of."""
        salts = inputs.cache_salts or [None] * inputs.num_reqs
        rows = [
            self._follow(self._known(request_id, token_ids, salt), token_ids, allowance)
            if allowance
            else []
            for request_id, token_ids, salt, allowance in zip(
                inputs.request_ids,
                inputs.token_ids,
                salts,
                inputs.num_draft_tokens.tolist(),
                strict=True,
            )
        ]
        return Draft.from_rows(rows, inputs.k)

    def _known(self, request_id: str, token_ids: TokenArray, salt: str | None) -> _Request:
        """The request, its table brought up to its history [num_tokens]."""
        request, history = self._requests.get(request_id), token_ids.tobytes()
        # One comparison tells a reused request id or a shortened history from a grown one.
        if request is None or not history.startswith(request.history):
            request = self._requests[request_id] = _Request(is_private=salt is not None)
        num_known = len(request.history) // token_ids.itemsize
        request.pairs.learn(token_ids[max(0, num_known - 2) :].tolist())
        request.history = history
        return request

    def _follow(self, request: _Request, token_ids: TokenArray, allowance: int) -> list[int]:
        """From pair to pair, as long as something is known."""
        pair, draft = token_ids[-2:].tolist(), list[int]()
        while len(pair) == 2 and len(draft) < min(allowance, self._max_length):
            token = request.pairs.get(*pair)
            if token is None and not request.is_private:
                token = self._shared.get(*pair)
            if token is None:
                break
            draft.append(token)
            pair = [pair[1], token]
        return draft

    def on_commit(self, commit: Commit) -> None:
        """Keep the outputs of requests that are drafted for."""
        for request_id, token_ids in zip(commit.request_ids, commit.token_ids, strict=True):
            request = self._requests.get(request_id)
            if request is not None and not request.is_private:
                request.output.extend(token_ids)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drop the tables of these requests, and learn from what they have put out."""
        for request_id in request_ids:
            request = self._requests.pop(request_id, None)
            if request is not None:
                self._shared.learn(request.output)


def build(options: Mapping[str, object], runtime: Runtime) -> SuccessorProposer:
    """A SuccessorProposer from resolved options."""
    return SuccessorProposer(
        max_length=cast(int, options["max_length"]),
        shared_pairs=cast(int, options["shared_pairs"]),
    )


SPEC = ProposerSpec(info=INFO, factory=build)
