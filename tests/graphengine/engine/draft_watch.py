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
from graphengine.kv.slot_audit import SlotAudit
from graphengine.request import Request
from graphengine.scheduler import PrefillChunk, StepPlan
from proposers.base import Draft
from proposers.model_based import ModelBasedProposer
from tests.graphengine.kv.build import slots

NAN = float("nan")


class DraftWatch:
    """Wraps the calls of an engine to its proposer, if that carries a model."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        proposer: Any = engine.proposer
        while not isinstance(proposer, ModelBasedProposer) and hasattr(proposer, "model"):
            proposer = proposer.model  # what is wrapped around it
        self.proposer = proposer if isinstance(proposer, ModelBasedProposer) else None
        self._written: set[int] = set()
        draft = {f"draft layer {index}": cache for index, cache in enumerate(self.caches)}
        self._slots = SlotAudit(draft, engine.kv.block_size)
        if self.proposer is None:
            return
        drafting = engine.drafting
        self._prefill, self._propose = drafting.prefill, drafting.propose
        drafting.prefill = self._spy_prefill  # type: ignore[method-assign]
        drafting.propose = self._spy_propose  # type: ignore[method-assign]

    @property
    def caches(self) -> list[torch.Tensor]:
        return [] if self.proposer is None else list(self.proposer.runtime.kv_caches)

    def begin(self) -> None:
        """Before a step."""
        self._slots.begin()
        self._written = set()

    def check(self) -> None:
        """After it: no draft KV but the calls' own has changed."""
        self._slots.check(self._written)

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
        """Rows of requests that are not there hold the declared fill.

        They are made here as the replay will make them, which may leave nothing to look at.
        """
        assert self.proposer is not None, "nobody captured a draft cell"
        rules = self.proposer._rules[key.query_len - 1]
        self.proposer.ops.prepare_window(self.proposer._cells.of(key).views, rules)
        buffers, width = self._engine.runner.buffers, self.proposer.width(key.query_len - 1)
        window = buffers.prefill(num_reqs=key.num_reqs, num_tokens=key.num_reqs * width)
        for name in ("token_ids", "positions", "slot_mapping"):
            assert (window[name][num_reqs * width :] == 0).all(), f"stale {name} in {key}"
        assert (window["block_table"][num_reqs:] == 0).all(), f"stale block_table in {key}"
        cell = buffers.cell(key)
        assert (cell["draft.requests"][num_reqs:] == 0).all(), f"stale requests in {key}"
        firsts = torch.arange(key.num_reqs, dtype=torch.int32, device=buffers.device)
        assert torch.equal(cell["draft.last_rows"][num_reqs:], firsts[num_reqs:] * width), key
        starts = torch.arange(key.num_reqs + 1, dtype=torch.int32, device=buffers.device)
        assert torch.equal(cell["draft.loop_start"], starts), f"stale loop_start in {key}"
        assert torch.equal(window["query_start_loc"], starts * width), f"stale starts in {key}"
        for name in ("loop_positions", "loop_slots"):
            steps = cell[f"draft.{name}"].view(key.query_len, key.num_reqs)
            assert (steps[:, num_reqs:] == 0).all(), f"stale {name} in {key}"
        ids = window["token_ids"]
        assert ids.min() >= 0, "a placeholder reaches the draft's embedding"

    def _spy_prefill(self, chunks: Sequence[PrefillChunk]) -> Any:
        for chunk in chunks:
            self._may_write(chunk.request, chunk.start + chunk.num_tokens)
        return self._prefill(chunks)

    def _spy_propose(self, plan: StepPlan) -> Draft:
        requests = [decode.request for decode in plan.decodes]
        for one in plan.decodes:
            self._may_write(one.request, one.request.kv_len + 1 + one.max_draft_tokens)
        draft = self._propose(plan)
        if draft.draft_kv_lens is not None:
            self._check_numbers(requests, draft.draft_kv_lens.tolist())
        return draft

    def _may_write(self, request: Request, end: int) -> None:
        first = max(request.draft_kv_len - 1, 0)
        self._written.update(slots(self._engine.kv, request, first, max(first, end)))

    def _check_numbers(self, requests: Sequence[Request], draft_kv_lens: Sequence[int]) -> None:
        size = self._engine.kv.block_size
        for request, count in zip(requests, draft_kv_lens, strict=True):
            for slot in range(min(count, request.kv_len)):
                block = request.block_table.block_ids[slot // size]
                for cache in self.caches:
                    assert cache[block, :, slot % size].isfinite().all(), f"no draft KV: {request}"
