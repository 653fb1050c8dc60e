"""SwitchableProposer: one engine, speculation on and off by turns.

Owns the limit on the drafts that an engine's proposer may make. At limit 0 every step carries no
draft, so the table's k = 0 cells serve it: off differs from on in nothing else. Knows no concrete
proposer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from graphengine.engine import Engine
from proposers.base import Commit, Draft, ProposeInputs, Proposer


class SwitchableProposer:
    """Passes everything on to `inner`, with at most `limit` drafts a row.

    Args:
        inner: the proposer that drafts.

    Attributes:
        limit: most drafts of a row, >= 0; None: what the engine allows. May change between steps.
    """

    def __init__(self, inner: Proposer) -> None:
        self.limit: int | None = None
        self._inner = inner

    @classmethod
    def install(cls, engine: Engine) -> SwitchableProposer:
        """Put a switch before the engine's proposer.

        Raises:
            ValueError: the engine was built without speculation.
        """
        if engine.proposer is None:
            raise ValueError("speculation is off: there is nothing to switch; pass --speculate")
        switch = cls(engine.proposer)
        engine.proposer = switch
        return switch

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def graph_safe(self) -> bool:
        return self._inner.graph_safe

    @property
    def needs_hidden_states(self) -> bool:
        return self._inner.needs_hidden_states

    @property
    def produces_probs(self) -> bool:
        return self._inner.produces_probs

    def propose(self, inputs: ProposeInputs) -> Draft:
        """A draft of width `inputs.k` with at most `limit` tokens a row."""
        if self.limit is None:
            return self._inner.propose(inputs)
        if self.limit == 0:
            return Draft.empty(inputs.num_reqs, inputs.k)
        allowed = np.minimum(inputs.num_draft_tokens, np.int32(self.limit))
        return self._inner.propose(replace(inputs, num_draft_tokens=allowed))

    def capture(self, manager: object) -> None:
        self._inner.capture(manager)

    def on_commit(self, commit: Commit) -> None:
        self._inner.on_commit(commit)

    def forget(self, request_ids: Sequence[str]) -> None:
        self._inner.forget(request_ids)
