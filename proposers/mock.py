"""Scripted proposers behind the normal interface, for tests of everything that verifies drafts.

Owns the recorded streams that they draft from (taken from a run without speculation) and the five
scripts: oracle, junk, accept-exactly-j, ragged, empty. Each draft is a function of the script, the
request id and the history alone, so that reordering, preemption and batch mates cannot change it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from proposers.base import Commit, Draft, HostProposer, ProposeInputs, TokenArray

Records = Mapping[str | tuple[int, ...], Sequence[int]]
"""Recorded streams: request id -> whole stream, prompt included; prompt -> output after it."""


class RecordedStreams:
    """Looks up the true next tokens of a request in Records."""

    def __init__(self, records: Records) -> None:
        self._by_id: dict[str, list[int]] = {}
        self._by_prompt: dict[tuple[int, ...], list[int]] = {}
        for key, tokens in records.items():
            if isinstance(key, str):
                self._by_id[key] = list(tokens)
            else:
                self._by_prompt[key] = [*key, *tokens]
        self._prompt_lengths = sorted({len(key) for key in self._by_prompt}, reverse=True)

    def next_tokens(
        self, request_id: str, history: TokenArray, num_tokens: int
    ) -> list[int] | None:
        """Up to num_tokens true next tokens, fewer at the recording's end; None without one.

        Raises AssertionError where the history has left the recording: the run under test is not
        the recorded one.
        """
        known = history.tolist()
        stream = self._by_id.get(request_id)
        # With several prompts that begin this history, the longest is the one that was recorded
        # from it.
        for length in self._prompt_lengths if stream is None else ():
            stream = self._by_prompt.get(tuple(known[:length]))
            if stream is not None:
                break
        if stream is None:
            return None
        common = min(len(known), len(stream))
        for position in range(common):
            assert known[position] == stream[position], (
                f"request {request_id!r} left its recording at position {position}: "
                f"token {known[position]}, recorded {stream[position]}"
            )
        return stream[len(known) : len(known) + num_tokens]


class MockProposer(HostProposer):
    """Base of the scripts: a subclass writes one row. Keeps what it is told, for tests."""

    def __init__(self, *, vocab_size: int, records: Records | None = None) -> None:
        assert vocab_size >= 2, "junk needs a second token"
        self.vocab_size = vocab_size
        self.streams = RecordedStreams(records or {})
        self.num_proposals = 0
        self.num_proposed_tokens = 0
        self.commits: list[Commit] = []
        self.forgotten: list[str] = []

    def propose(self, inputs: ProposeInputs) -> Draft:
        """One scripted row for each request, within its allowance."""
        rows = [
            self.draft_row(request_id, history, allowance) if allowance else []
            for request_id, history, allowance in zip(
                inputs.request_ids, inputs.token_ids, inputs.num_draft_tokens.tolist(), strict=True
            )
        ]
        self.num_proposals += 1
        self.num_proposed_tokens += sum(map(len, rows))
        return Draft.from_rows(rows, inputs.k)

    def draft_row(self, request_id: str, history: TokenArray, allowance: int) -> list[int]:
        """The drafts of one request, at most allowance of them."""
        raise NotImplementedError

    def on_commit(self, commit: Commit) -> None:
        """Remember it in commits."""
        self.commits.append(commit)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Remember them in forgotten."""
        self.forgotten.extend(request_ids)

    def true_tokens(self, request_id: str, history: TokenArray, num_tokens: int) -> list[int]:
        """The recorded next tokens. Raises ValueError for a request that was never recorded."""
        tokens = self.streams.next_tokens(request_id, history, num_tokens)
        if tokens is None:
            raise ValueError(f"{self.name!r} has no recording of request {request_id!r}")
        return tokens

    def not_the(self, token: int) -> int:
        """A valid token that is not the given one."""
        return (token + 1) % self.vocab_size


class OracleProposer(MockProposer):
    """Drafts the recorded tokens: every draft is accepted, at every position."""

    name = "mock-oracle"

    def draft_row(self, request_id: str, history: TokenArray, allowance: int) -> list[int]:
        return self.true_tokens(request_id, history, allowance)


class JunkProposer(MockProposer):
    """Drafts that are never accepted: none of the recorded tokens; unrecorded, only token_id."""

    name = "mock-junk"

    def __init__(
        self, *, vocab_size: int, records: Records | None = None, token_id: int | None = None
    ) -> None:
        super().__init__(vocab_size=vocab_size, records=records)
        self.token_id = vocab_size - 1 if token_id is None else token_id

    def draft_row(self, request_id: str, history: TokenArray, allowance: int) -> list[int]:
        tokens = self.streams.next_tokens(request_id, history, allowance)
        if tokens is None:
            return [self.token_id] * allowance
        return [self.not_the(token) for token in tokens]


class AcceptExactly(MockProposer):
    """Drafts num_accepted recorded tokens, then junk: just those of a longer draft are accepted."""

    name = "mock-accept-exactly"

    def __init__(
        self, num_accepted: int, *, vocab_size: int, records: Records | None = None
    ) -> None:
        super().__init__(vocab_size=vocab_size, records=records)
        self.num_accepted = num_accepted

    def draft_row(self, request_id: str, history: TokenArray, allowance: int) -> list[int]:
        tokens = self.true_tokens(request_id, history, allowance)
        kept = tokens[: self.num_accepted]
        return kept + [self.not_the(token) for token in tokens[self.num_accepted :]]


class RaggedProposer(MockProposer):
    """Drafts 0..allowance tokens, each the recorded one with probability true_fraction, or junk.

    Without a recording every draft is junk. The schedule is drawn from (seed, request id, history
    length).
    """

    name = "mock-ragged"

    def __init__(
        self,
        *,
        vocab_size: int,
        records: Records | None = None,
        seed: int = 0,
        true_fraction: float = 0.8,
    ) -> None:
        super().__init__(vocab_size=vocab_size, records=records)
        self.seed = seed
        self.true_fraction = true_fraction

    def draft_row(self, request_id: str, history: TokenArray, allowance: int) -> list[int]:
        schedule = random.Random(f"{self.seed}/{request_id}/{len(history)}")
        length = schedule.randint(0, allowance)
        tokens = self.streams.next_tokens(request_id, history, length)
        if tokens is None:
            return [self.vocab_size - 1] * length
        return [
            token if schedule.random() < self.true_fraction else self.not_the(token)
            for token in tokens
        ]


class EmptyProposer(MockProposer):
    """Never drafts: every step is a plain one."""

    name = "mock-empty"

    def draft_row(self, request_id: str, history: TokenArray, allowance: int) -> list[int]:
        return []
