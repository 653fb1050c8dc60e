"""A proposer that drafts as another one does and breaks its contract now and then.

What it does wrong must come out of the engine as an error, and cost no request a token.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from proposers.base import Draft, ProposeInputs, Proposer, TokenArray
from proposers.device import ModelProposer, PrefillInputs
from proposers.mock import MockProposer


class Mischief(Exception):
    """What a hostile proposer raises."""


class HostileProposer(MockProposer):
    """Drafts as another proposer does, and breaks its contract in a share of the calls."""

    name = "hostile"

    def __init__(self, inner: Proposer, *, vocab_size: int, seed: int, share: float) -> None:
        super().__init__(vocab_size=vocab_size)
        self.inner, self.share, self.draw = inner, share, random.Random(seed)
        self.kept: list[ProposeInputs] = []
        self.deeds: Counter[str] = Counter()

    def propose(self, inputs: ProposeInputs) -> Draft:
        draft = self.inner.propose(inputs)
        if self.draw.random() >= self.share or not inputs.num_reqs:
            return draft
        deed = self.draw.choice([name for name in dir(self) if name.startswith(("_do_", "_may_"))])
        self.deeds[deed] += 1
        return getattr(self, deed)(inputs, draft)  # type: ignore[no-any-return]

    @property
    def num_breaches(self) -> int:
        """Calls so far in which the contract was broken; `_may_` deeds keep to it."""
        return sum(count for deed, count in self.deeds.items() if deed.startswith("_do_"))

    def on_commit(self, commit: Any) -> None:
        self.inner.on_commit(commit)
        if self.draw.random() < self.share / 4:
            raise Mischief("on_commit")
        for tokens in commit.token_ids:  # its own copy, or the engine's?
            tokens.append(-5)

    def forget(self, request_ids: Any) -> None:
        self.inner.forget(request_ids)
        if self.draw.random() < self.share / 4:
            raise Mischief("forget")

    def _do_raise(self, inputs: ProposeInputs, draft: Draft) -> Draft:
        raise Mischief("propose")

    def _do_outside(self, inputs: ProposeInputs, draft: Draft) -> Draft:
        row = self.draw.randrange(inputs.num_reqs)
        draft.token_ids[row, 0] = self.draw.choice((-1, -7, self.vocab_size, 2**31 - 1))
        draft.num_draft_tokens[row] = max(1, draft.num_draft_tokens[row])
        return draft

    def _do_too_many(self, inputs: ProposeInputs, draft: Draft) -> Draft:
        rows = np.zeros((inputs.num_reqs, inputs.k), dtype=np.int32)
        return Draft(token_ids=rows, num_draft_tokens=inputs.num_draft_tokens + 1)

    def _do_wide(self, inputs: ProposeInputs, draft: Draft) -> Draft:
        return Draft.empty(inputs.num_reqs, inputs.k + 1)

    def _do_short(self, inputs: ProposeInputs, draft: Draft) -> Draft:
        return Draft.empty(inputs.num_reqs - 1, inputs.k)

    def _do_wrong_dtype(self, inputs: ProposeInputs, draft: Draft) -> Draft:
        return replace(draft, token_ids=draft.token_ids.astype(np.int64))

    def _do_raise_allowance(self, inputs: ProposeInputs, draft: Draft) -> Draft:
        inputs.num_draft_tokens[:] = inputs.k  # must fail: no rows are reserved for these
        return Draft(
            token_ids=np.zeros((inputs.num_reqs, inputs.k), dtype=np.int32),
            num_draft_tokens=np.full(inputs.num_reqs, inputs.k, dtype=np.int32),
        )

    def _do_write_history(self, inputs: ProposeInputs, draft: Draft) -> Draft:
        inputs.token_ids[0][:] = 0  # must fail: the view is read-only
        return draft

    def _may_keep(self, inputs: ProposeInputs, draft: Draft) -> Draft:
        self.kept.append(inputs)
        return draft

    def _may_shorten(self, inputs: ProposeInputs, draft: Draft) -> Draft:
        draft.num_draft_tokens[:] = draft.num_draft_tokens // 2
        draft.token_ids[np.arange(inputs.k) >= draft.num_draft_tokens[:, None]] = -1
        return draft


class HostileModelProposer(HostileProposer):
    """The same around a proposer that carries a model, once an engine has built and captured it."""

    def __init__(self, inner: ModelProposer, *, vocab_size: int, seed: int, share: float) -> None:
        super().__init__(inner, vocab_size=vocab_size, seed=seed, share=share)
        self.model = inner
        self.graph_safe = True

    def prefill(self, inputs: PrefillInputs) -> TokenArray:
        filled = self.model.prefill(inputs)
        if self.draw.random() < self.share / 4:
            raise Mischief("prefill")
        return filled

    def first_drafts(self, token_ids: TokenArray, block_table: TokenArray) -> TokenArray:
        return self.model.first_drafts(token_ids, block_table)

    @property
    def suspects(self) -> str:
        return self.model.suspects
