"""StatsCounter: counts what the engine did, as it does it.

Owns the speculation counters; capture, compile and KV figures are read from their owners when a
snapshot is asked for. Only committed tokens count: a draft that was accepted and then cut off by a
stop is in no figure but the drafted ones.
"""

from __future__ import annotations

from graphengine.kv.manager import KVManager
from graphengine.model_runner import ModelRunner
from graphengine.outputs import EngineStats


class StatsCounter:
    """Mutable counters behind `EngineStats`."""

    def __init__(self, *, max_draft_tokens: int) -> None:
        self.num_prefill_tokens = 0
        self.num_preemptions = 0
        self._num_steps = 0
        self._num_request_steps = 0
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._num_accepted_tokens = 0
        self._num_emitted_tokens = 0
        self._accepted_per_position = [0] * max_draft_tokens

    def count_step(self, num_reqs: int) -> None:
        """A step of `num_reqs` requests; of none, nothing was replayed."""
        self._num_steps += num_reqs > 0
        self._num_request_steps += num_reqs

    def count_request(self, num_draft_tokens: int, num_accepted: int, num_emitted: int) -> None:
        """What one request got out of a step."""
        self._num_drafts += num_draft_tokens > 0
        self._num_draft_tokens += num_draft_tokens
        self._num_accepted_tokens += num_accepted
        self._num_emitted_tokens += num_emitted
        for position in range(num_accepted):
            self._accepted_per_position[position] += 1

    def snapshot(self, runner: ModelRunner, kv: KVManager) -> EngineStats:
        capture, blocks = runner.manager.stats, kv.stats()
        events = runner.compiler.events
        return EngineStats(
            num_steps=self._num_steps,
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
            num_emitted_tokens=self._num_emitted_tokens,
            num_request_steps=self._num_request_steps,
            num_prefill_tokens=self.num_prefill_tokens,
            num_preemptions=self.num_preemptions,
            accepted_per_position=tuple(self._accepted_per_position),
            replays=dict(capture.replays),
            padding_rows=capture.padding_rows,
            eager_fallbacks=dict(capture.eager_fallbacks),
            compile_events=len(events),
            compile_events_after_warmup=sum(event.after_warmup for event in events),
            capture_seconds=dict(capture.seconds),
            capture_bytes=dict(capture.num_bytes),
            kv_blocks_used=blocks.num_used,
            kv_blocks_free=blocks.num_free,
            kv_blocks_cached=blocks.num_cached,
        )
