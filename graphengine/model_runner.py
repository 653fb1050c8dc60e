"""ModelRunner: the target model over static buffers; decode and verify only through the table.

Owns the decoder, the static buffers and the capture manager, and moves a step's inputs and outputs
across the host's edge. Prefill runs the same row-wise ops beside the table. Knows a step's rows and
drafts, not how they were scheduled or proposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from capture.compile import PieceCompiler
from capture.config import CaptureConfig
from capture.edge import Edge, HostViews
from capture.manager import Capturable, CaptureManager
from capture.shapes import ShapeKey
from capture.stream import Stream
from graphengine import step_batch
from graphengine.attention.base import HostRows, plan
from graphengine.captured_step import make_buffers, make_steps
from graphengine.config import is_native
from graphengine.frame import Frame
from graphengine.kernels import library
from graphengine.models.block import ForwardBuffers, ForwardInputs
from graphengine.models.decoder import DecoderWeights
from graphengine.models.factory import LayerFactory
from graphengine.models.hidden_states import HiddenStates
from graphengine.opset import OpSet
from graphengine.opset_choice import make_opset
from graphengine.probe import VerifierShape
from graphengine.prompt_logprobs import PromptLogprobs
from graphengine.request import Request
from graphengine.request_state import RequestState
from graphengine.resolve import (
    CUSTOM,
    GREEDY,
    LOGITS,
    LOGPROBS,
    MAX_PREFILL_ROWS,
    SAMPLED,
    ResolvedConfig,
)
from graphengine.scheduler import PrefillChunk
from graphengine.target_attention import make_target_attention
from graphengine.tracing import PLAN, PREFILL, traced
from proposers.base import Draft
from proposers.device_draft import DeviceDraft

LIKELY = ("logprob_ids", "logprob_values", "logprob_ranks")


@dataclass(frozen=True, slots=True)
class _Cell:
    """A cell's buffers, and what is made of them once."""

    views: Mapping[str, torch.Tensor]
    forward: ForwardInputs  # as attention plans them
    # as the host writes them, by tier and area of the edge
    inputs: dict[tuple[str, int], HostViews] = field(default_factory=dict)


class ModelRunner:
    """See the module docstring.

    Args:
        resolved: sizes and the shape table.
        weights: loaded parameters.
        kv_caches: one tensor a layer.
        capture: capture configuration.
        state: the persistent request rows that steps gather from.
        stream: where steps run.
    """

    def __init__(
        self,
        resolved: ResolvedConfig,
        weights: DecoderWeights,
        kv_caches: list[torch.Tensor],
        *,
        capture: CaptureConfig,
        state: RequestState,
        stream: Stream,
    ) -> None:
        self.sizes = resolved.sizes
        self.compiler = PieceCompiler("inductor" if capture.compile == "inductor" else "off")
        self.opset = make_opset(resolved, capture, self.compiler)
        self.layers = LayerFactory(self.opset, max_model_len=self.sizes.max_model_len)
        self.hidden_states = _hidden_states(resolved, self.opset)
        attention, self.attention_choice = make_target_attention(resolved, self.opset)
        self.decoder = self.layers.decoder(
            resolved.model, weights, kv_caches, self.hidden_states, attention
        )
        self.verifier = self.opset.verifier()
        self.buffers = make_buffers(resolved.model, self.sizes, resolved.device, resolved.draft)
        native = is_native(capture, resolved.device)
        self.manager = CaptureManager(
            resolved.table,
            self.buffers,
            capture,
            steps=make_steps(
                self.decoder,
                self.opset,
                self.verifier,
                self.buffers,
                state.device,
                rejection=self.sizes.rejection,
            ),
            prepare=self._prepare,
            run_program=library.load().run_calls if native else _no_native_calls,
            stream=stream,
        )
        self.edge = Edge(self.buffers, stream)
        self.stream = stream
        self.device_rows = state.device
        self._state = state
        self._cells: dict[ShapeKey, _Cell] = {}
        self._packed = self.buffers.whole("packed").view(self.sizes.num_state_rows, -1)
        self._prompt_logprobs = PromptLogprobs(self.decoder, self.opset)

    @property
    def row_counts(self) -> list[int]:
        """Rows of a forward, as cells use them and as a sample of what prefill may use."""
        cells = {key.num_tokens for key in self.manager.table}
        return sorted(cells | {1, 2, 3, 5, 8, 13, 31, 64, 129, MAX_PREFILL_ROWS})

    @property
    def verifier_shape(self) -> VerifierShape:
        """The verifier and the sizes that it is called with."""
        return VerifierShape(
            verify=self.verifier,
            num_rows=self.sizes.num_state_rows,
            max_draft_tokens=self.sizes.max_draft_tokens,
            num_target_ids=self.buffers.whole("target_ids").numel(),
            num_token_ids=self.buffers.whole("token_ids").numel(),
        )

    @property
    def _warm_prefills(self) -> list[tuple[int, int]]:
        """Requests and rows of forwards that between them need whatever prefill may need compiled.

        Torch compiles a piece for one row, and for any more; Triton's attention has another kernel
        for many rows, and for many requests.
        """
        few = [(1, 1), (1, 2)]
        many = [(1, MAX_PREFILL_ROWS), (self.sizes.num_state_rows, MAX_PREFILL_ROWS)]
        return few if self.opset.device.type == "cpu" else few + many

    def capture(
        self,
        progress: Callable[[int, int, str], None] | None = None,
        proposer: Capturable | None = None,
    ) -> None:
        """Capture the whole table, and the proposer's graphs behind it."""
        self.manager.capture_all(progress)
        for num_reqs, num_rows in self._warm_prefills:
            views = self.buffers.prefill(num_reqs=num_reqs, num_tokens=num_rows)
            for name in step_batch.PREFILL_INPUTS:
                views[name].fill_(self.buffers.specs[name].fill)
            views["query_start_loc"][1:] = num_rows  # all of the first one's
            inputs = ForwardInputs.of(views, num_rows)
            plan(self.decoder.attention, inputs.attention)
            self.decoder.forward(inputs, ForwardBuffers.of(views))
        if proposer is not None:
            self.manager.capture_proposer(proposer)
        self.compiler.finish_warmup()

    def verify(self, requests: Sequence[Request], draft: Draft) -> Frame:
        """Launch one decode step through the table.

        Args:
            requests: [num_reqs] in batch order, their state rows up to date.
            draft: of these requests. Its distributions are looked at by rejection alone.
        """
        probs = None if draft.probs is None else draft.probs.detach().numpy()
        batch = step_batch.DecodeBatch(
            requests,
            draft.token_ids,
            draft.num_draft_tokens,
            probs,
            draft if isinstance(draft, DeviceDraft) else None,
        )
        tier = tier_of(requests)
        if tier == CUSTOM:
            self._replay(batch, LOGITS)
            self.manager.count_eager("logits_processors")
        key = self._replay(batch, tier)
        likely = None
        if tier in (LOGPROBS, CUSTOM):
            views = self.buffers.cell(key)
            ids, values, ranks = (self.edge.read(views[name]) for name in LIKELY)
            likely = (ids, values, ranks)
        return Frame(key, len(requests), self.edge.read(self._packed), likely)

    def _replay(self, batch: step_batch.DecodeBatch, tier: str) -> ShapeKey:
        """Write a cell's inputs and replay it."""
        key = self._plan(batch, tier)
        num_reqs = len(batch.requests)
        num_tokens = num_reqs + int(batch.num_draft_tokens.sum())
        self.manager.replay(key, num_reqs=num_reqs, num_tokens=num_tokens)
        return key

    @traced(PLAN)
    def _plan(self, batch: step_batch.DecodeBatch, tier: str) -> ShapeKey:
        """Write and send the inputs of the batch's cell, and plan attention over them."""
        key = self.manager.dispatch(len(batch.requests), batch.longest, tier)
        self.manager.make_ready(key)
        cell, state = self._cell(key), self._state
        inputs = self._inputs_of(cell, tier)
        step_batch.write_decode(inputs, key, state, batch)
        host = step_batch.decode_rows(inputs, key, state, batch.requests)
        if tier != LOGITS:  # from here on a request's own functions may drop requests
            state.launched(batch.requests)
        if tier not in (GREEDY, LOGITS):
            step_batch.write_sampled(inputs, key, state, batch)
            if self.sizes.rejection:
                step_batch.write_draft_probs(inputs, key, batch)
        if tier == CUSTOM:  # the cell of the first half has left its logits in the same storage
            logits = self.edge.read(cell.views["logits"]).wait()
            step_batch.write_custom(inputs, key, batch, logits)
        self.decoder.attention.plan(cell.forward.attention, host)
        self.edge.send(cell.views, inputs)
        if batch.on_device is not None:
            drafts = cell.views["draft_token_ids"].view(key.num_reqs, -1)
            self.stream.run(partial(batch.on_device.copy_to, drafts))
        return key

    @traced(PREFILL)
    def prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        """Fill the KV rows of prompt chunks; outside the table, counted."""
        for part in split_chunks(chunks, MAX_PREFILL_ROWS, self.sizes.num_state_rows):
            num_tokens = sum(chunk.num_tokens for chunk in part)
            views = self.buffers.prefill(num_reqs=len(part), num_tokens=num_tokens)
            self.edge.begin()
            host = self.edge.views(views, step_batch.PREFILL_INPUTS)
            step_batch.write_prefill(host, self._state, part)
            longest = max(chunk.num_tokens for chunk in part)
            inputs, buffers = ForwardInputs.of(views, longest), ForwardBuffers.of(views)
            self.decoder.attention.plan(inputs.attention, step_batch.prefill_rows(host, part))
            self.edge.send(views, host)
            self.stream.run(partial(self.decoder.forward, inputs, buffers))
            if any(chunk.request.needs_whole_prompt for chunk in part):
                self.stream.synchronize()
                self._prompt_logprobs.collect(buffers, part)
            self.manager.count_eager("prefill")

    def last_logits(self, key: ShapeKey) -> torch.Tensor:
        """Logits [num_reqs, query_len, vocab] fp32 of the latest replay, which must be of `key`.

        On the host; where steps run at once on CPU, a view that is valid until the next one.
        """
        name = "raw_logits" if key.tier == CUSTOM else "logits"
        logits = torch.from_numpy(self.edge.read(self._cell(key).views[name]).wait())
        return logits.view(key.num_reqs, key.query_len, -1)

    def report(self) -> str:
        """The table as captured and the choice of attention, printable."""
        return f"{self.manager.report()}\n{self.attention_choice}"

    def close(self) -> None:
        """Drop graphs, buffers, weights and KV, so that their memory is free at once."""
        self.stream.close()
        self.manager.close()
        self._cells.clear()
        self.buffers.release()
        # The manager holds the step, the step the decoder, and the manager's filler this runner.
        del self.manager, self.decoder, self.verifier, self._packed, self._prompt_logprobs
        del self.layers, self.hidden_states, self.opset

    def _cell(self, key: ShapeKey) -> _Cell:
        if key not in self._cells:
            views = self.buffers.cell(key)
            self._cells[key] = _Cell(views, ForwardInputs.of(views))
        return self._cells[key]

    def _inputs_of(self, cell: _Cell, tier: str) -> HostViews:
        """Host arrays of what a step of a tier is told, to be written and sent."""
        self.edge.begin()
        area = self.edge.area
        if (tier, area) not in cell.inputs:
            cell.inputs[tier, area] = self.edge.views(cell.views, self._names(tier))
        return cell.inputs[tier, area]

    def _names(self, tier: str) -> Sequence[str]:
        if tier in (GREEDY, LOGITS):
            return step_batch.DECODE_INPUTS
        return (
            *step_batch.SAMPLED_INPUTS,
            *(step_batch.REJECTION_INPUTS if self.sizes.rejection else ()),
            *(step_batch.CUSTOM_INPUTS if tier == CUSTOM else ()),
        )

    def _prepare(self, key: ShapeKey, variant: int) -> None:
        """Inputs of a plausible batch for warm-up and capture: all rows live in the null block."""
        cell = self._cell(key)
        views = self._inputs_of(cell, key.tier)
        for name in views:
            views[name][...] = self.buffers.specs[name].fill
        views["query_start_loc"][:] = np.arange(key.num_reqs + 1) * key.query_len
        views["query_len"][0] = key.query_len
        views["draft_token_ids"][:] = variant
        views["allowed_drafts"][: key.num_reqs] = (key.query_len - 1) * variant
        self.edge.send(cell.views, views)
        self.stream.synchronize()
        lens = np.full(key.num_reqs, key.query_len, dtype=np.int32)
        host = HostRows(views["block_table"], views["query_start_loc"], lens)
        self.decoder.attention.plan(cell.forward.attention, host)


def _no_native_calls(address: int, num_calls: int) -> None:
    raise AssertionError(f"{num_calls} native calls in a step without native ops")


def tier_of(requests: Iterable[Request]) -> str:
    """The cheapest tier that has what every one of these needs."""
    if any(request.params.processors for request in requests):
        return CUSTOM
    if any(request.params.logprobs is not None for request in requests):
        return LOGPROBS
    is_greedy = all(request.params.is_plain_greedy for request in requests)
    return GREEDY if is_greedy else SAMPLED


def _hidden_states(resolved: ResolvedConfig, opset: OpSet) -> HiddenStates | None:
    """Room for what the proposer reads of the target; None: nothing."""
    if resolved.draft is None or not resolved.draft.taps:
        return None
    return HiddenStates(
        resolved.draft.taps,
        hidden_size=resolved.model.hidden_size,
        num_blocks=resolved.num_blocks,
        block_size=resolved.sizes.block_size,
        dtype=resolved.dtype,
        device=resolved.device,
        store=opset.store_slots(),
    )


def split_chunks(
    chunks: Sequence[PrefillChunk], max_rows: int, max_reqs: int
) -> list[list[PrefillChunk]]:
    """Pack chunks, in order, into forwards of at most `max_rows` tokens and `max_reqs` requests."""
    parts: list[list[PrefillChunk]] = []
    room = 0
    for chunk in chunks:
        start, left = chunk.start, chunk.num_tokens
        while left:
            if room == 0 or len(parts[-1]) == max_reqs:
                parts.append([])
                room = max_rows
            take = min(left, room)
            parts[-1].append(PrefillChunk(chunk.request, start, take))
            start, left, room = start + take, left - take, room - take
    return parts
