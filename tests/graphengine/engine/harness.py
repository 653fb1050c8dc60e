"""Harness: runs an engine step by step and checks every promise that a step makes.

Before each step the null block and every KV slot that nobody owns are filled with NaN. After it
the KV bookkeeping is audited, slots outside the step's own rows must hold the bytes they held, the
padding of every input buffer must be its declared fill, and the counters must agree with what came
out. Collects streams, finish reasons and, on demand, the logits of every verified position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from capture.shapes import ShapeKey
from graphengine.engine import Engine
from graphengine.kv.auditor import audit
from graphengine.kv.slot_audit import SlotAudit
from graphengine.model_runner import tier_of
from graphengine.outputs import CompletionOutput, RequestOutput
from graphengine.request import Request
from graphengine.resolve import CUSTOM, GREEDY, LOGITS
from graphengine.sampling.params import SamplingParams
from graphengine.scheduler import PrefillChunk
from graphengine.step_batch import DECODE_INPUTS, SAMPLED_INPUTS
from proposers.base import Draft
from proposers.chain import TIER
from tests.graphengine.engine.draft_watch import DraftWatch
from tests.graphengine.kv.build import slots

MAX_STEPS = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One request of a schedule: when it comes and when, if at all, it is aborted."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    arrives: int = 0  # before this step
    aborts: int | None = None


@dataclass
class Harness:
    """An engine under observation. Use one for the whole life of its engine.

    Args:
        engine: freshly started.
        poison: fill unowned KV with NaN before each step.
        keep_logits: remember the logits of every row whose token was emitted.
    """

    engine: Engine
    poison: bool = True
    keep_logits: bool = False
    requests: dict[str, Request] = field(default_factory=dict)
    outputs: dict[str, RequestOutput] = field(default_factory=dict)
    # (request id, position of the row) -> [vocab] fp32
    logits: dict[tuple[str, int], np.ndarray[Any, Any]] = field(default_factory=dict)
    # the same of what the sampler has made of them, where it ran and nothing was poisoned
    processed: dict[tuple[str, int], np.ndarray[Any, Any]] = field(default_factory=dict)
    num_steps: int = 0
    num_padding_rows: int = 0
    num_interrupts: int = 0  # steps that broke off, as the test says; their counts may be lost
    batch_sizes: list[int] = field(default_factory=list)  # requests of each verify

    def __post_init__(self) -> None:
        runner = self.engine.runner
        self._caches = runner.decoder.kv_caches
        self._written: set[int] = set()
        target = {f"layer {index}": cache for index, cache in enumerate(self._caches)}
        if runner.hidden_states is not None:
            target["hidden states"] = runner.hidden_states.storage
        self._slots = SlotAudit(target, self.engine.kv.block_size)
        self._prefill, self._verify = runner.prefill, runner.verify
        self._replay = runner.manager.replay
        self.watch = DraftWatch(self.engine)
        runner.prefill = self._spy_prefill  # type: ignore[method-assign]
        runner.verify = self._spy_verify  # type: ignore[method-assign]
        runner.manager.replay = self._spy_replay  # type: ignore[method-assign]

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
    ) -> Request:
        self.engine.add_request(request_id, prompt, params, cache_salt=cache_salt)
        for stream in self.engine.delivery.streams[request_id].answers:
            self.requests[stream.request.request_id] = stream.request
        return self.requests[request_id]

    def abort(self, request_id: str) -> bool:
        aborted = self.engine.abort(request_id)
        self.audit()
        return aborted

    def step(self) -> list[RequestOutput]:
        """One step, with all checks around it."""
        if self.poison:
            self._poison_unowned()
            self.watch.poison()
        self._slots.begin()
        self.watch.begin()
        self._written = set()
        outputs = self.engine.step()
        self.num_steps += 1
        self.audit()
        self._slots.check(self._written)
        self.watch.check()
        self._check_written()
        for output in outputs:
            self._collect(output)
        return outputs

    def drain(self) -> None:
        for _ in range(MAX_STEPS):
            if not self.engine.has_unfinished_requests():
                self.step()  # delivers what was aborted since the last one
                self.check_drained()
                return
            self.step()
        raise AssertionError(f"still running after {MAX_STEPS} steps")

    def drain_through_interrupts(self) -> None:
        """As `drain`, going on after every Ctrl-C."""
        while self.engine.has_unfinished_requests():
            try:
                self.step()
            except KeyboardInterrupt:
                self.num_interrupts += 1
        self.check_drained()

    def run(self, jobs: Sequence[Job]) -> None:
        """Run a schedule to its end."""
        last = max(max(job.arrives, job.aborts or 0) for job in jobs)
        for now in range(last + 1):
            for job in jobs:
                if job.arrives == now:
                    self.add(job.request_id, job.prompt, job.params)
                if job.aborts == now:
                    self.abort(job.request_id)
            self.step()
        self.drain()

    def stream(self, request_id: str) -> list[int]:
        """Emitted tokens of a finished request, of its first answer."""
        return self.outputs[request_id].outputs[0].token_ids

    def streams(self, request_id: str) -> list[list[int]]:
        """Emitted tokens of all its answers."""
        return [answer.token_ids for answer in self.outputs[request_id].outputs]

    def reason(self, request_id: str) -> str | None:
        return self.outputs[request_id].outputs[0].finish_reason

    def audit(self) -> None:
        audit(self.engine.kv, self.requests.values())
        stats = self.engine.stats()
        assert 0 <= stats.num_accepted_tokens <= stats.num_draft_tokens
        assert sum(stats.accepted_per_position) == stats.num_accepted_tokens
        # Up to the logits is half a step, and drafts are before it.
        tiers = {key: key.split(":")[1] for key in stats.replays}
        num_replays = sum(stats.replays[key] for key in tiers if tiers[key] not in (LOGITS, TIER))
        assert 0 <= num_replays - stats.num_steps <= self.num_interrupts
        assert stats.padding_rows == self.num_padding_rows
        for request in self.engine.scheduler.running:
            assert self.engine.state.history(request).tolist() == request.token_ids
            self._check_device_row(request)
            if request.params.has_penalties:
                self._check_counts(request)

    def _check_device_row(self, request: Request) -> None:
        """The step's own row of a request holds its tokens."""
        state = self.engine.state
        device, row = state.device, state.row_of(request)
        if state._num_unread[row]:
            return  # a step that broke off; the next one starts the row anew
        known = device.token_ids[row, : int(device.num_tokens[row])].tolist()
        assert known == request.token_ids

    def _check_counts(self, request: Request) -> None:
        """The penalties' tables are what counting the request's tokens gives."""
        state = self.engine.state
        sampler, row = state.device.sampler, state.row_of(request)
        if state._num_unread[row]:
            return
        counted = np.bincount(request.output_token_ids, minlength=sampler.vocab_size)
        assert sampler.counts[row].tolist() == counted.tolist()
        in_prompt = np.flatnonzero(sampler.in_prompt[row].cpu().numpy())
        assert in_prompt.tolist() == sorted(set(request.prompt_token_ids))

    def audit_between_steps(self) -> None:
        """As `audit`, after a step that broke off: its reservations last until the next one."""
        for request in self.engine.scheduler.running:
            self.engine.kv.trim(request)
        self.audit()

    def check_drained(self) -> None:
        """Nothing is left of finished requests but cached blocks."""
        stats = self.engine.kv.stats()
        assert stats.num_used == 0
        assert stats.num_free == stats.num_blocks - 1
        assert not self.engine.delivery.streams
        assert not self.engine.scheduler.running
        assert not self.engine.scheduler.waiting

    def _collect(self, output: RequestOutput) -> None:
        answer = output.outputs[output.index]
        before = self.outputs.get(output.request_id)
        old = before.outputs[output.index].token_ids if before is not None else []
        old_text = before.outputs[output.index].text if before is not None else ""
        assert before is None or not before.finished, "an output after the last one"
        assert answer.token_ids[: len(old)] == old, "an emitted token changed"
        assert len(answer.token_ids) == len(old) + output.num_new_tokens
        assert len(answer.token_origins) == len(answer.token_ids), "one origin a token"
        assert answer.text == old_text + output.new_text, "text that no step has given out"
        self._check_logprobs(answer, self.requests[output.request_id].params.logprobs)
        if answer.finish_reason is not None and self.engine.tokenizer is not None:
            self._check_text(answer, self.requests[output.request_id].params)
        told = output.outputs if output.finished else [answer]
        accepted = sum(one.token_origins.count("accepted") for one in told)
        counted = output.metrics.num_accepted_tokens
        assert counted == accepted or (self.num_interrupts and counted < accepted)
        ends = [one.finish_reason is not None for one in output.outputs]
        assert output.finished == all(ends)
        self.outputs[output.request_id] = output

    def _check_logprobs(self, answer: CompletionOutput, number: int | None) -> None:
        """One entry for each token, with that token and the likeliest in it."""
        assert (answer.logprobs is None) == (number is None)
        for token, entry in zip(answer.token_ids, answer.logprobs or (), strict=False):
            assert number == 0 or 1 in {one.rank for one in entry.values()}
            assert number == 0 or len(entry) in (number, (number or 0) + 1)
            assert entry[token].logprob <= max(one.logprob for one in entry.values())
        if answer.logprobs is not None:
            assert len(answer.logprobs) == len(answer.token_ids)

    def _check_text(self, answer: CompletionOutput, params: SamplingParams) -> None:
        """The whole text, or what comes before the stop string that its last token completes."""
        assert self.engine.tokenizer is not None
        decoded, before = (
            self.engine.tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
            for ids in (answer.token_ids, answer.token_ids[:-1])
        )
        if answer.text != decoded:
            included = params.include_stop_str_in_output
            ends = [len(answer.text) + (0 if included else len(stop)) for stop in params.stop]
            assert decoded.startswith(answer.text)
            assert any(
                decoded[:end].endswith(stop) for end, stop in zip(ends, params.stop, strict=True)
            )
            assert len(before) < max(ends), "the ids go on behind the stop string"

    def _spy_prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        for chunk in chunks:
            end = chunk.start + chunk.num_tokens
            self._written.update(slots(self.engine.kv, chunk.request, chunk.start, end))
        self._prefill(chunks)

    def _spy_verify(self, batch: list[Request], draft: Draft) -> Any:
        drafts, lengths = draft.token_ids, draft.num_draft_tokens
        self.batch_sizes.append(len(batch))
        for request, num_draft_tokens in zip(batch, lengths.tolist(), strict=True):
            start, stop = request.kv_len, request.kv_len + 1 + num_draft_tokens
            assert stop < self.engine.resolved.sizes.max_model_len, "a row at the context limit"
            self._written.update(slots(self.engine.kv, request, start, stop))
        frame = self._verify(batch, draft)
        packed = frame.packed()
        for (count, accepted, *ids), draft in zip(packed.tolist(), drafts.tolist(), strict=True):
            common = [a == b for a, b in zip(ids[:count], draft, strict=False)]
            assert accepted == [*common, False].index(False)
        if self.keep_logits:
            self._remember_logits(batch, packed, int(lengths.max(initial=0)))
        return frame

    def _remember_logits(self, batch: list[Request], packed: Any, longest: int) -> None:
        runner = self.engine.runner
        key = runner.manager.dispatch(len(batch), longest, tier_of(batch))
        logits = runner.last_logits(key).cpu().numpy()
        if runner.manager.config.debug and key.tier == CUSTOM:
            return  # they are the first graph's, and poisoned before the second
        processed = None
        if key.tier != GREEDY and not runner.manager.config.debug:
            views = runner.buffers.cell(key)
            processed = views["processed"].view(key.num_reqs, key.query_len, -1).cpu().numpy()
        for index, request in enumerate(batch):
            for offset in range(packed[index, 0]):
                place = (request.request_id, request.num_tokens - 1 + offset)
                assert place not in self.logits, f"{place} verified twice"
                self.logits[place] = logits[index, offset].copy()
                if processed is not None:
                    self.processed[place] = processed[index, offset].copy()

    def _spy_replay(self, key: ShapeKey, *, num_reqs: int, num_tokens: int) -> None:
        # What carries no token writes to slot 0, which no request owns.
        if key.tier == TIER:
            self.watch.check_padding(key, num_reqs)
            num_padding = self.watch.num_padding(key)
        else:
            self.check_padding(key, num_reqs)
            allowed = self.engine.runner.buffers.cell(key)["allowed_drafts"]
            num_padding = key.num_tokens - num_reqs - int(allowed[:num_reqs].sum())
        self._replay(key, num_reqs=num_reqs, num_tokens=num_tokens)
        if key.tier != TIER and not self.engine.runner.manager.config.debug:
            slots = self.engine.runner.buffers.cell(key)["slot_mapping"]
            assert int((slots == 0).sum()) == num_padding
        self.num_padding_rows += num_padding

    def check_padding(self, key: ShapeKey, num_reqs: int) -> None:
        """Input buffers of a cell, just before its replay: padding holds the declared fill."""
        buffers = self.engine.runner.buffers
        read = DECODE_INPUTS if key.tier in (GREEDY, LOGITS) else SAMPLED_INPUTS
        if "has_draft_probs" in buffers.specs and read is SAMPLED_INPUTS:
            read = (*read, "has_draft_probs")  # without which nobody reads a row of draft_probs
        for name in set(read) - {"query_len", "query_start_loc"}:
            spec, view = buffers.specs[name], buffers.cell(key)[name]
            live = num_reqs * key.query_len if spec.shape[0] == "T" else num_reqs
            assert (view[live:] == spec.fill).all(), f"stale padding in {name} of {key}"
        loc = buffers.cell(key)["query_start_loc"]
        assert loc.tolist() == [n * key.query_len for n in range(key.num_reqs + 1)]
        assert buffers.cell(key)["query_len"].tolist() == [key.query_len]
        drafts = buffers.cell(key)["draft_token_ids"].view(-1, key.query_len)
        allowed = buffers.cell(key)["allowed_drafts"][: key.num_reqs, None]
        live = drafts[torch.arange(key.query_len, device=allowed.device) < allowed]
        assert (live >= 0).all(), "a placeholder reaches the embedding"
        assert (live < self.engine.resolved.model.vocab_size).all()

    def _poison_unowned(self) -> None:
        kv = self.engine.kv
        clean, _ = kv.pool.free_block_ids()
        for cache in self._caches:
            cache[[0, *clean]] = float("nan")
        # Ctrl-C may have come between a launch and its landing, which the next step makes good.
        self.engine.flights.recount(self.engine.scheduler.running)
        for request in self.engine.scheduler.running:
            written = request.kv_len + request.num_in_flight
            table = request.block_table.block_ids
            for index in range(written // kv.block_size, len(table)):
                first = max(0, written - index * kv.block_size)
                for cache in self._caches:
                    cache[table[index], :, first:] = float("nan")

    def _check_written(self) -> None:
        """The step's own slots hold numbers."""
        size = self.engine.kv.block_size
        num_slots, device = self.engine.kv.pool.num_blocks * size, self._caches[0].device
        mine = torch.zeros(num_slots, dtype=torch.bool, device=device)
        mine[list(self._written)] = True
        for cache in self._caches:
            rows = cache.transpose(1, 2).reshape(mine.numel(), -1)[mine]
            assert rows.isfinite().all(), "a live row was not written, or attended to garbage"
