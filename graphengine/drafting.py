"""Drafting: the engine's side of its proposer. What it is told, what it is asked, what it gave.

Owns the order of the calls and the check of every answer. The KV of a proposer that carries a model
lies over the requests' own block tables; here it is told where.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graphengine.draft_length.controller import DraftLength
from graphengine.model_runner import ModelRunner
from graphengine.request import Request
from graphengine.request_state import IntArray, RequestState
from graphengine.sampled import Sampled
from graphengine.scheduler import PrefillChunk, StepPlan
from graphengine.tracing import DRAFT, PREFILL, traced
from proposers.base import CacheRows, Commit, Draft, ProposeInputs, Proposer
from proposers.device import ModelProposer, PrefillInputs
from proposers.device_draft import DeviceDraft

WAITS = "async:draft_gap"  # steps in which a request went without drafts until others have landed


class Drafting:
    """See the module docstring.

    Args:
        proposer: None: nobody drafts.
        state: the persistent rows of requests.
        runner: of the target; its manager counts what runs outside the graphs.
        length: says how many drafts a step carries.
        vocab_size: of the target.
    """

    def __init__(
        self,
        proposer: Proposer | None,
        state: RequestState,
        runner: ModelRunner,
        length: DraftLength,
        *,
        vocab_size: int,
    ) -> None:
        self.proposer = proposer
        self.length = length
        self._state = state
        self._manager = runner.manager
        # Where the host's arrays are the device's, there is nothing to save by not looking.
        self._keeps = not runner.edge.is_direct
        self._vocab_size = vocab_size
        self._has_gap = False  # which the host can fill once steps under way have landed

    @property
    def waits(self) -> bool:
        """Whether steps under way must land before drafts can be made for everybody."""
        return self._has_gap or (self.proposer is not None and needs_tokens(self.proposer))

    @traced(PREFILL)
    def prefill(self, chunks: Sequence[PrefillChunk]) -> IntArray | None:
        """Let the proposer fill its KV of chunks that the target has run.

        Returns:
            int32 [num_chunks], leading slots of each request that hold draft KV now; None where the
            proposer has none.
        """
        proposer = self.proposer
        if not isinstance(proposer, ModelProposer):
            return None
        filled = np.array([chunk.request.draft_kv_len for chunk in chunks], dtype=np.int32)
        # Who may emit one token more is never drafted for.
        asked = [index for index, one in enumerate(chunks) if one.request.draft_room]
        if asked:
            filled[asked] = self._fill(proposer, [chunks[index] for index in asked])
        return filled

    def _fill(self, proposer: ModelProposer, chunks: Sequence[PrefillChunk]) -> IntArray:
        requests = [chunk.request for chunk in chunks]
        ends = np.array([chunk.start + chunk.num_tokens for chunk in chunks], dtype=np.int32)
        cache = self._cache_rows(requests)
        filled = proposer.prefill(
            PrefillInputs(
                token_ids=[self._state.history(request) for request in requests],
                num_slots=ends,
                draft_kv_lens=cache.draft_kv_lens,
                block_table=cache.block_table,
                num_new_rows=sum(chunk.num_tokens for chunk in chunks),
            )
        )
        name = proposer.name
        assert isinstance(filled, np.ndarray), (
            f"proposer {name!r} gave {filled!r:.80} for its prefill: expected an int32 array"
        )
        assert (filled.dtype, filled.shape) == (ends.dtype, ends.shape), (
            f"proposer {name!r} gave {filled.dtype} {filled.shape} for its prefill, expected "
            f"{ends.dtype} {ends.shape}"
        )
        bounds = zip(cache.draft_kv_lens.tolist(), filled.tolist(), ends.tolist(), strict=True)
        for request, (before, now, end) in zip(requests, bounds, strict=True):
            assert before <= now <= end, (
                f"proposer {name!r} says that {now} slots of {request.request_id!r} hold draft KV; "
                f"there were {before}, and the target has {end}"
            )
        return filled

    @traced(DRAFT)
    def propose(self, plan: StepPlan) -> Draft:
        """Drafts for the decodes of a plan, of its width, checked.

        Raises:
            AssertionError: what the proposer gave is no draft for them.
        """
        proposer, requests = self.proposer, [decode.request for decode in plan.decodes]
        self._has_gap = False
        if proposer is None or not requests:
            return Draft.empty(len(requests), plan.k)
        if plan.k == 0:
            if self.length.listens and not proposer.graph_safe:
                rooms = [one.draft_room for one in requests]
                self.length.expect(requests, self._ask(proposer, requests, rooms, self.length.most))
            return Draft.empty(len(requests), 0)
        allowances = [decode.max_draft_tokens for decode in plan.decodes]
        return self.length.cut(requests, self._ask(proposer, requests, allowances, plan.k))

    def _ask(
        self, proposer: Proposer, requests: Sequence[Request], most: Sequence[int], k: int
    ) -> Draft:
        """Drafts of width k, checked; at most so many of each request."""
        allowances = np.minimum(np.array(most, dtype=np.int32), np.int32(k))
        allowances.flags.writeable = False  # rows are reserved for these: not its own to raise
        inputs = ProposeInputs(
            request_ids=[request.request_id for request in requests],
            token_ids=[self._state.history(request) for request in requests],
            num_draft_tokens=allowances,
            k=k,
            sampling=[request.sampling for request in requests],
            cache_salts=[request.cache_salt for request in requests],
            cache=self._cache_rows(requests),
            num_in_flight=np.array([one.num_in_flight for one in requests], dtype=np.int32),
            on_device=self._keeps
            and not needs_tokens(proposer)
            and not any(one.params.needs_tokens for one in requests),
        )
        draft = proposer.propose(inputs)
        assert isinstance(draft, Draft), (
            f"proposer {proposer.name!r} gave {draft!r:.80}: expected a Draft"
        )
        draft.validate(inputs, self._vocab_size)
        if isinstance(draft, DeviceDraft) and draft.waits:
            self._has_gap = True
            self._manager.count_eager(WAITS)
        if not proposer.graph_safe:
            self._manager.count_eager(f"proposer:{proposer.name}")
        return draft

    @traced(DRAFT)
    def on_commit(self, sampled: Sequence[Sampled]) -> None:
        """Tell the policy and the proposer what was committed."""
        self.length.committed(sampled)
        if self.proposer is not None and sampled:
            self.proposer.on_commit(
                Commit(
                    request_ids=[item.decode.request.request_id for item in sampled],
                    token_ids=[item.token_ids for item in sampled],
                    num_accepted=[item.num_accepted for item in sampled],
                )
            )

    def forget(self, request_ids: Sequence[str]) -> None:
        """Tell them who is gone: what has ended, and what is to start over."""
        self.length.forget(request_ids)
        if request_ids and self.proposer is not None:
            self.proposer.forget(request_ids)

    def close(self) -> None:
        """Drop the proposer, and what it is told about."""
        self.proposer = None
        self.length.close()
        del self._state, self._manager

    def _cache_rows(self, requests: Sequence[Request]) -> CacheRows:
        rows = [self._state.row_of(request) for request in requests]
        return CacheRows(
            block_table=self._state.block_table[rows],
            draft_kv_lens=np.array(
                [request.expected_draft_kv_len for request in requests], dtype=np.int32
            ),
            state_rows=np.array(rows, dtype=np.int32),
        )


def needs_tokens(proposer: Proposer) -> bool:
    """Whether it reads a step's tokens on the host; so does every one that says nothing of it."""
    return bool(getattr(proposer, "needs_tokens", True))
