"""DraftWatch: what the harness checks of a proposer with KV of its own.

Before each step every draft row and hidden state that is not valid is filled with NaN. Calls may
write draft KV of their own requests alone, from the last valid row to the last reserved one, and
the rows that are said to be valid afterwards must be numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from capture.shapes import ShapeKey
from graphengine.engine import Engine
from graphengine.request import Request
from graphengine.scheduler import PrefillChunk, StepPlan
from proposers.base import Draft
from proposers.model_based import ModelBasedProposer

NAN = float("nan")


class DraftWatch:
    """Wraps the calls of an engine to its proposer, if that carries a model."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        proposer: Any = engine.proposer
        while not isinstance(proposer, ModelBasedProposer) and hasattr(proposer, "model"):
            proposer = proposer.model  # what is wrapped around it
        self.proposer = proposer if isinstance(proposer, ModelBasedProposer) else None
        if self.proposer is None:
            return
        drafting = engine.drafting
        self._prefill, self._propose = drafting.prefill, drafting.propose
        drafting.prefill = self._spy_prefill  # type: ignore[method-assign]
        drafting.propose = self._spy_propose  # type: ignore[method-assign]

    @property
    def caches(self) -> list[torch.Tensor]:
        return [] if self.proposer is None else list(self.proposer.runtime.kv_caches)

    def poison(self) -> None:
        """Fill what is not valid; a valid row that is wrong shows as a draft that is."""
        pool, size = self._engine.kv.pool, self._engine.kv.block_size
        clean, cached = pool.free_block_ids()
        undrafted = [block for block in cached if not pool.is_drafted(block)]
        states = self._engine.runner.hidden_states
        for cache in self.caches:
            cache[[0, *clean, *undrafted]] = NAN
        if states is not None:
            states.storage.view(pool.num_blocks, size, -1)[[0, *clean]] = NAN
        for request in self._engine.scheduler.running:
            for index, block in enumerate(request.block_table.block_ids):
                known = max(0, request.draft_kv_len - index * size)
                for cache in self.caches if not pool.is_drafted(block) else ():
                    cache[block, :, known:] = NAN
                if states is not None:
                    known = max(0, request.kv_len - index * size)
                    states.storage.view(pool.num_blocks, size, -1)[block, known:] = NAN

    def num_padding(self, key: ShapeKey) -> int:
        """Rows of a draft cell that carry no token: they have the null block's first slot."""
        assert self.proposer is not None, "nobody captured a draft cell"
        buffers, k = self._engine.runner.buffers, key.query_len - 1
        num_rows = key.num_reqs * self.proposer.width(k)
        window = buffers.prefill(num_reqs=key.num_reqs, num_tokens=num_rows)
        num_loop_rows = self.proposer.num_loop_rows(k, k) * key.num_reqs
        loop = buffers.cell(key)["draft.loop_slots"][:num_loop_rows]
        return int((window["slot_mapping"] == 0).sum()) + int((loop == 0).sum())

    def check_padding(self, key: ShapeKey, num_reqs: int) -> None:
        """Rows of requests that are not there hold the declared fill."""
        assert self.proposer is not None, "nobody captured a draft cell"
        buffers, width = self._engine.runner.buffers, self.proposer.width(key.query_len - 1)
        window = buffers.prefill(num_reqs=key.num_reqs, num_tokens=key.num_reqs * width)
        for name in ("token_ids", "positions", "slot_mapping"):
            assert (window[name][num_reqs * width :] == 0).all(), f"stale {name} in {key}"
        assert (window["block_table"][num_reqs:] == 0).all(), f"stale block_table in {key}"
        cell = buffers.cell(key)
        assert (cell["draft.requests"][num_reqs:] == 0).all(), f"stale requests in {key}"
        for name in ("loop_positions", "loop_slots"):
            steps = cell[f"draft.{name}"].view(key.query_len, key.num_reqs)
            assert (steps[:, num_reqs:] == 0).all(), f"stale {name} in {key}"
        ids = window["token_ids"]
        assert ids.min() >= 0, "a placeholder reaches the draft's embedding"

    def _spy_prefill(self, chunks: Sequence[PrefillChunk]) -> Any:
        ends = [chunk.start + chunk.num_tokens for chunk in chunks]
        return self._watched(
            [chunk.request for chunk in chunks], ends, lambda: self._prefill(chunks)
        )

    def _spy_propose(self, plan: StepPlan) -> Draft:
        requests = [decode.request for decode in plan.decodes]
        ends = [one.request.kv_len + 1 + one.max_draft_tokens for one in plan.decodes]
        draft: Draft = self._watched(requests, ends, lambda: self._propose(plan))
        if draft.draft_kv_lens is not None:
            self._check_numbers(requests, draft.draft_kv_lens.tolist())
        return draft

    def _watched(self, requests: Sequence[Request], ends: Sequence[int], call: Any) -> Any:
        size = self._engine.kv.block_size
        mine = torch.zeros(self._engine.kv.pool.num_blocks, size, dtype=torch.bool)
        mine[0] = True  # the null block, where padding may write
        for request, end in zip(requests, ends, strict=True):
            table = request.block_table.block_ids
            for slot in range(max(request.draft_kv_len - 1, 0), end):
                mine[table[slot // size], slot % size] = True
        before = [cache.clone() for cache in self.caches]
        mine = mine.to(before[0].device)
        found = call()
        for old, new in zip(before, self.caches, strict=True):
            bits = torch.int32 if old.dtype == torch.float32 else torch.int16
            changed = (old.view(bits) != new.view(bits)).any(-1).any(-1).any(1)
            assert not (changed & ~mine).any(), "draft KV written that the call does not own"
        return found

    def _check_numbers(self, requests: Sequence[Request], draft_kv_lens: Sequence[int]) -> None:
        size = self._engine.kv.block_size
        for request, count in zip(requests, draft_kv_lens, strict=True):
            for slot in range(min(count, request.kv_len)):
                block = request.block_table.block_ids[slot // size]
                for cache in self.caches:
                    assert cache[block, :, slot % size].isfinite().all(), f"no draft KV: {request}"
