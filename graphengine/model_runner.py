"""ModelRunner: the target model over static buffers; prefill beside the table, decode and verify only through it.

Owns weights, KV tensors, static buffers and the capture manager, and the definition of the captured step. Knows a step's
rows and drafts, not how they were scheduled or proposed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from capture.buffers import BufferSpec, StaticBuffers
from capture.compile import PieceCompiler
from capture.config import CaptureConfig
from capture.manager import CaptureManager
from capture.shapes import ShapeKey
from graphengine import step_batch
from graphengine.attention.base import AttentionShape
from graphengine.kernels import library
from graphengine.models.config import ModelConfig
from graphengine.models.decoder import Decoder, DecoderWeights, ForwardBuffers, ForwardInputs
from graphengine.models.native_ops import NativeAttention, NativeOps
from graphengine.request_state import MAX_STOP_IDS, IntArray, RequestState
from graphengine.resolve import GREEDY, ResolvedConfig, RunnerSizes
from graphengine.sampling.verifier import greedy_verify
from graphengine.scheduler import PrefillChunk

MAX_PREFILL_ROWS = 256  # rows of one prefill forward; longer chunks take several

Views = Mapping[str, torch.Tensor]


def buffer_specs(model: ModelConfig, sizes: RunnerSizes) -> list[BufferSpec]:
    """Every static buffer of the step, by who writes it: the host first, then the forward, then the verifier."""
    rows, int32, fp32 = sizes.num_state_rows, torch.int32, torch.float32
    qkv_size = model.q_size + 2 * model.kv_size
    return [
        BufferSpec(name="token_ids", shape=("T",), dtype=int32, role="input"),
        BufferSpec(name="positions", shape=("T",), dtype=int32, role="input"),
        BufferSpec(name="slot_mapping", shape=("T",), dtype=int32, role="input"),
        BufferSpec(name="block_table", shape=("R", sizes.max_blocks), dtype=int32, role="input"),
        BufferSpec(name="query_start_loc", shape=("R+1",), dtype=int32, role="input"),
        BufferSpec(name="query_len", shape=(1,), dtype=int32, role="input", cells_only=True),
        BufferSpec(name="num_draft_tokens", shape=(rows,), dtype=int32, role="input", cells_only=True),
        BufferSpec(name="stop_ids", shape=(rows, MAX_STOP_IDS), dtype=int32, role="input", cells_only=True),
        BufferSpec(name="max_new_tokens", shape=(rows,), dtype=int32, role="input", fill=1, cells_only=True),
        BufferSpec(name="hidden", shape=("T", model.hidden_size), dtype=fp32, role="scratch"),
        BufferSpec(name="normed", shape=("T", model.hidden_size), dtype=fp32, role="scratch"),
        BufferSpec(name="qkv", shape=("T", qkv_size), dtype=fp32, role="scratch"),
        BufferSpec(name="attended", shape=("T", model.q_size), dtype=fp32, role="scratch"),
        BufferSpec(name="activated", shape=("T", model.intermediate_size), dtype=fp32, role="scratch"),
        BufferSpec(name="logits", shape=("T", model.vocab_size), dtype=fp32, role="output", cells_only=True),
        BufferSpec(name="target_ids", shape=("T",), dtype=int32, role="scratch", cells_only=True),
        BufferSpec(
            name="packed", shape=(rows, sizes.max_draft_tokens + 2), dtype=int32, role="output", cells_only=True
        ),
    ]


class ModelRunner:
    """See the module docstring.

    Args:
        resolved: sizes and the shape table.
        weights: loaded parameters.
        kv_caches: one tensor a layer.
        capture: capture configuration.
        state: the persistent request rows that steps gather from.
    """

    def __init__(
        self,
        resolved: ResolvedConfig,
        weights: DecoderWeights,
        kv_caches: list[torch.Tensor],
        *,
        capture: CaptureConfig,
        state: RequestState,
    ) -> None:
        model, sizes, dtype = resolved.model, resolved.sizes, resolved.dtype
        self.sizes = sizes
        self._state = state
        shape = AttentionShape(
            model.num_heads, model.num_kv_heads, model.head_dim, sizes.block_size, model.sliding_window
        )
        self.compiler = PieceCompiler("off" if capture.compile == "off" else "inductor")
        self._verify_op = self.compiler.piece("greedy_verify", greedy_verify)
        self.decoder = Decoder(
            model,
            weights,
            kv_caches,
            ops=NativeOps(dtype, model.rms_norm_eps),
            attention=NativeAttention(dtype, shape),
            max_model_len=sizes.max_model_len,
        )
        self.buffers = StaticBuffers(
            buffer_specs(model, sizes),
            max_num_reqs=sizes.num_state_rows,
            max_num_tokens=MAX_PREFILL_ROWS,
            max_cell_tokens=sizes.num_state_rows * (sizes.max_draft_tokens + 1),
            max_query_len=sizes.max_draft_tokens + 1,
            device=torch.device("cpu"),
        )
        self.manager = CaptureManager(
            resolved.table,
            self.buffers,
            capture,
            fn=self.verify_step,
            prepare=self._prepare,
            run_program=library.load().run_calls,
        )
        self._host_cells: dict[ShapeKey, step_batch.HostViews] = {}
        self._inputs: dict[ShapeKey, ForwardInputs] = {}
        whole = self.buffers.cell(ShapeKey(sizes.num_state_rows, sizes.max_draft_tokens + 1, GREEDY))
        self._packed = whole["packed"].numpy()
        self.logits = whole["logits"]

    def verify_step(self, views: Views) -> None:
        """The captured step: from token ids to emitted tokens, on the device, without the host."""
        buffers = ForwardBuffers.of(views)
        self.decoder.forward(ForwardInputs.of(views), buffers)
        self.decoder.logits(views["logits"], buffers)
        self.decoder.ops.argmax(views["target_ids"], views["logits"])
        whole = self._whole
        self._verify_op(
            views["packed"],
            whole["target_ids"],
            whole["token_ids"],
            views["query_len"],
            views["num_draft_tokens"],
            views["stop_ids"],
            views["max_new_tokens"],
        )

    def capture(self, progress: Callable[[int, int, str], None] | None = None) -> None:
        """Capture the whole table."""
        self.manager.capture_all(progress)
        self.compiler.finish_warmup()

    def verify(
        self, rows: npt.NDArray[np.intp], draft_token_ids: IntArray, num_draft_tokens: IntArray
    ) -> IntArray:
        """Run one decode step through the table.

        Args:
            rows: [num_reqs] state rows in batch order.
            draft_token_ids: [num_reqs, k], anything beyond each request's drafts.
            num_draft_tokens: [num_reqs].

        Returns:
            int32 [num_reqs, k_max + 2], a view of the output buffer: number of emitted tokens, then their ids, -1
            beyond. Valid until the next step.
        """
        longest = int(num_draft_tokens.max(initial=0))
        key = self.manager.dispatch(len(rows), longest, GREEDY)
        step_batch.write_decode(self._host_cell(key), key, self._state, rows, draft_token_ids, num_draft_tokens)
        self.decoder.attention.plan(self._cell_inputs(key).attention)
        self.manager.replay(key, num_reqs=len(rows))
        return self._packed[: len(rows)]

    def prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        """Fill the KV rows of prompt chunks. Runs the same row-wise ops as decode; counted, outside the table."""
        for part in _split_chunks(chunks, MAX_PREFILL_ROWS, self.sizes.num_state_rows):
            num_tokens = sum(chunk.num_tokens for chunk in part)
            views = self.buffers.prefill(num_reqs=len(part), num_tokens=num_tokens)
            step_batch.write_prefill(step_batch.host_views(views, step_batch.PREFILL_INPUTS), self._state, part)
            inputs = ForwardInputs.of(views)
            self.decoder.attention.plan(inputs.attention)
            self.decoder.forward(inputs, ForwardBuffers.of(views))
            self.manager.count_eager("prefill")

    def close(self) -> None:
        self.manager.close()

    @property
    def _whole(self) -> Views:
        sizes = self.sizes
        return self.buffers.cell(ShapeKey(sizes.num_state_rows, sizes.max_draft_tokens + 1, GREEDY))

    def _host_cell(self, key: ShapeKey) -> step_batch.HostViews:
        if key not in self._host_cells:
            self._host_cells[key] = step_batch.host_views(self.buffers.cell(key), step_batch.DECODE_INPUTS)
        return self._host_cells[key]

    def _cell_inputs(self, key: ShapeKey) -> ForwardInputs:
        if key not in self._inputs:
            self._inputs[key] = ForwardInputs.of(self.buffers.cell(key))
        return self._inputs[key]

    def _prepare(self, key: ShapeKey, variant: int) -> None:
        """Inputs of a plausible batch for warm-up and capture: all rows live in the null block."""
        views = self._host_cell(key)
        for name in step_batch.DECODE_INPUTS:
            views[name][...] = self.buffers.specs[name].fill
        views["query_start_loc"][:] = np.arange(key.num_reqs + 1, dtype=np.int32) * key.query_len
        views["query_len"][0] = key.query_len
        views["token_ids"][:] = variant
        views["positions"].reshape(-1, key.query_len)[:] = np.arange(key.query_len) + variant * self.sizes.block_size
        views["num_draft_tokens"][: key.num_reqs] = (key.query_len - 1) * variant


def _split_chunks(chunks: Sequence[PrefillChunk], max_rows: int, max_reqs: int) -> list[list[PrefillChunk]]:
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
