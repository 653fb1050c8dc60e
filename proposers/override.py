"""OverridingProposer: a model's drafts, but a text's own where it repeats itself at length.

Row by row: where a matching proposer (n-gram, suffix) has found a long match, its drafts take the
model's place; in a step in which it has them all the model does not run, and what its KV lacks is
caught up when it next does. A replaced row was certain: its distribution is a point.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from capture.manager import CaptureManager
from proposers.base import Commit, Draft, ProposeInputs, Proposer, TokenArray
from proposers.device import ModelProposer, PrefillInputs


class OverridingProposer:
    """See the module docstring.

    Args:
        model: drafts where nothing long is found.
        matcher: says how long its matches are (`Draft.match_lengths`).
        min_match: matches of at least so many tokens override.
    """

    def __init__(self, model: ModelProposer, matcher: Proposer, *, min_match: int) -> None:
        self.model = model
        self.matcher = matcher
        self.name = model.name
        self.graph_safe = model.graph_safe
        self.needs_hidden_states = model.needs_hidden_states
        self.produces_probs = model.produces_probs
        self.suspects = model.suspects
        self._min_match = min_match
        self._manager: CaptureManager | None = None

    def capture(self, manager: object) -> None:
        """Capture the model's graphs; the matcher runs beside them, counted."""
        assert isinstance(manager, CaptureManager), f"{manager!r} captures nothing"
        self._manager = manager
        self.model.capture(manager)

    def prefill(self, inputs: PrefillInputs) -> TokenArray:
        """Fill the model's KV."""
        return self.model.prefill(inputs)

    def first_drafts(self, token_ids: TokenArray, block_table: TokenArray) -> TokenArray:
        """The model's."""
        return self.model.first_drafts(token_ids, block_table)

    def variants(self) -> Iterator[tuple[str, ModelProposer]]:
        """The model's."""
        return self.model.variants()

    def propose(self, inputs: ProposeInputs) -> Draft:
        """The matcher's drafts where its match is long, the model's elsewhere."""
        assert self._manager is not None, f"proposer {self.name} has not been captured"
        matched = self.matcher.propose(inputs)
        self._manager.count_eager(f"override:{self.matcher.name}")
        assert matched.match_lengths is not None, f"{self.matcher.name} does not match"
        wins = (matched.match_lengths >= self._min_match) & (matched.num_draft_tokens > 0)
        asks = inputs.num_draft_tokens > 0
        if not (asks & ~wins).any():
            return self._alone(matched, asks & wins, inputs)
        drafted = self.model.propose(inputs)
        return self._merged(drafted, matched, wins, inputs) if wins.any() else drafted

    def on_commit(self, commit: Commit) -> None:
        """Tell both."""
        self.model.on_commit(commit)
        self.matcher.on_commit(commit)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Tell both, also where one of them fails."""
        try:
            self.model.forget(request_ids)
        finally:
            self.matcher.forget(request_ids)

    def _alone(self, matched: Draft, wins: npt.NDArray[np.bool_], inputs: ProposeInputs) -> Draft:
        """The matcher's drafts, where they are long enough."""
        rows = [
            matched.token_ids[row, : matched.num_draft_tokens[row]] if wins[row] else ()
            for row in range(inputs.num_reqs)
        ]
        return replace(Draft.from_rows(rows, inputs.k), match_lengths=matched.match_lengths)

    def _merged(
        self,
        drafted: Draft,
        matched: Draft,
        wins: npt.NDArray[np.bool_],
        inputs: ProposeInputs,
    ) -> Draft:
        lengths = np.array([len(tokens) for tokens in inputs.token_ids], dtype=np.int32)
        cached = drafted.draft_kv_lens
        if cached is not None:  # the model's rows behind the history are of its own drafts
            cached = np.where(wins, np.minimum(cached, lengths), cached).astype(np.int32)
        token_ids = np.where(wins[:, None], matched.token_ids, drafted.token_ids)
        counts = np.where(wins, matched.num_draft_tokens, drafted.num_draft_tokens)
        return Draft(
            token_ids=token_ids.astype(np.int32),
            num_draft_tokens=counts.astype(np.int32),
            probs=with_points(drafted.probs, token_ids, wins),
            draft_kv_lens=cached,
            match_lengths=matched.match_lengths,
        )


def with_points(
    probs: torch.Tensor | None, token_ids: TokenArray, wins: npt.NDArray[np.bool_]
) -> torch.Tensor | None:
    """The distributions [num_reqs, k, vocab], certain where the row is the matcher's."""
    if probs is None:
        return None
    probs, rows = probs.clone(), torch.from_numpy(np.flatnonzero(wins))
    ids = torch.from_numpy(np.maximum(token_ids, 0).astype(np.int64))[rows]
    probs[rows] = torch.zeros_like(probs[rows]).scatter_(2, ids[:, :, None], 1.0)
    return probs
