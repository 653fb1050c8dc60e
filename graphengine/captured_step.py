"""The captured step: from requests' rows to accepted counts, and the static buffers it runs over.

Owns the definition of the step, in two halves, and the list of its buffers by who writes them. The
calls are what graphs capture: they run only ops, read nothing back to the host, and are the same
for every cell of a tier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from capture.buffers import BufferSpec, StaticBuffers
from graphengine.device_rows import DeviceRows
from graphengine.models.block import ForwardBuffers, ForwardInputs
from graphengine.models.config import ModelConfig
from graphengine.models.decoder import Decoder
from graphengine.models.layers import LayerOps
from graphengine.opset import CellOp, OpSet, RowOps
from graphengine.request_state import MAX_STOP_IDS
from graphengine.resolve import (
    CUSTOM,
    GREEDY,
    LOGITS,
    LOGPROBS,
    SAMPLED,
    RunnerSizes,
)
from graphengine.sampling.masks import mask_words
from graphengine.sampling.params import MAX_LOGPROBS
from graphengine.sampling.verifier import NO_STOP, GreedyVerify, packed_width
from graphengine.step_batch import ANY_NUMBER
from proposers.device import DraftPlan

Views = Mapping[str, torch.Tensor]


def buffer_specs(model: ModelConfig, sizes: RunnerSizes) -> list[BufferSpec]:
    """Every static buffer: those of the host, of the forward and of the verifier."""
    rows, width = sizes.num_state_rows, packed_width(sizes.max_draft_tokens)
    vocabulary = ("T", model.vocab_size)
    rejection = [
        _input("has_draft_probs", (rows,), cells_only=True),
        _input("draft_probs", vocabulary, dtype=torch.float32, cells_only=True),
    ]
    custom = [
        _input(name, vocabulary, dtype=torch.float32, cells_only=True)
        for name in ("raw_logits", "custom_logits")
    ]
    return [
        *(rejection if sizes.rejection else ()),
        *(custom if sizes.custom_logits else ()),
        # Written by the host for a prefill, by the step's own first op in a cell.
        *(
            BufferSpec(name=name, shape=("T",), dtype=torch.int32, role="scratch")
            for name in ("token_ids", "positions", "slot_mapping")
        ),
        _input("block_table", ("R", sizes.max_blocks)),
        _input("query_start_loc", ("R+1",)),
        _input("query_len", (1,), cells_only=True),
        _input("state_rows", (rows,), fill=sizes.max_num_seqs, cells_only=True),
        _input("allowed_drafts", (rows,), cells_only=True),
        _input("draft_token_ids", ("T",), cells_only=True),
        _input("most_new_tokens", (rows,), fill=ANY_NUMBER, cells_only=True),
        _input("stop_ids", (rows, MAX_STOP_IDS), fill=NO_STOP, cells_only=True),
        _input("mask", ("T", mask_words(model.vocab_size)), fill=-1, cells_only=True),
        _activation("hidden", model.hidden_size),
        _activation("normed", model.hidden_size),
        _activation("qkv", model.q_size + 2 * model.kv_size),
        _activation("attended", model.q_size),
        _activation("activated", model.intermediate_size),
        _output("logits", vocabulary, torch.float32),
        BufferSpec(
            name="processed",
            shape=vocabulary,
            dtype=torch.float32,
            role="scratch",
            cells_only=True,
        ),
        _numbers("num_draft_tokens", (rows,)),
        _numbers("max_new_tokens", (rows,)),
        _numbers("target_ids", ("T",)),
        _output("logprob_ids", ("T", MAX_LOGPROBS + 1), torch.int32),
        _output("logprob_values", ("T", MAX_LOGPROBS + 1), torch.float32),
        _output("logprob_ranks", ("T",), torch.int32),
        _output("packed", (rows, width), torch.int32),
    ]


def make_buffers(
    model: ModelConfig,
    sizes: RunnerSizes,
    device: torch.device,
    draft: DraftPlan | None = None,
) -> StaticBuffers:
    """The static buffers of a runner; on the meta device they only tell their size.

    Args:
        draft: what the proposer needs beside the target's.
    """
    return StaticBuffers(
        [*buffer_specs(model, sizes), *(draft.buffers if draft is not None else ())],
        max_num_reqs=sizes.num_state_rows,
        max_num_tokens=sizes.max_num_tokens,
        max_cell_tokens=sizes.max_cell_tokens,
        device=device,
    )


class Forward:
    """The first half of a step: from the requests' rows to logits."""

    def __init__(self, decoder: Decoder, rows: RowOps) -> None:
        self._decoder = decoder
        self._rows = rows

    def __call__(self, views: Views) -> None:
        self._rows.prepare(views)
        buffers = ForwardBuffers.of(views)
        self._decoder.forward(ForwardInputs.of(views), buffers)
        self._decoder.logits(views["logits"], buffers.hidden, buffers.normed)


class Choose:
    """The other half: from logits to what each request emits, and its row with that.

    Args:
        ops: of the decoder.
        sampler: chooses the target's token for every row; None: the most likely one.
        logprobs: gives out what was likely; None: nothing is.
        verify: the verifier.
        rows: makes the inputs once more where the halves are apart, and keeps what is emitted.
        buffers: where the views come from; the verifier looks at whole storages, so that its shapes
            do not depend on the cell and it is compiled once.
        custom: the host has put logits of its own between the halves.
    """

    def __init__(
        self,
        ops: LayerOps,
        sampler: CellOp | None,
        logprobs: CellOp | None,
        verify: GreedyVerify,
        rows: RowOps,
        buffers: StaticBuffers,
        *,
        custom: bool = False,
    ) -> None:
        self._ops = ops
        self._sampler = sampler
        self._logprobs = logprobs
        self._verify = verify
        self._rows = rows
        self._all_target_ids = buffers.whole("target_ids")
        self._all_token_ids = buffers.whole("token_ids")
        self._custom = custom

    def __call__(self, views: Views) -> None:
        if self._custom:
            self._rows.prepare(views)
        if self._sampler is None:
            self._ops.argmax(views["target_ids"], views["logits"])
        else:
            self._sampler(self._with_logits(views, "custom_logits"))
        if self._logprobs is not None:
            self._logprobs(self._with_logits(views, "raw_logits"))
        self._verify(
            views["packed"],
            self._all_target_ids,
            self._all_token_ids,
            views["query_len"],
            views["num_draft_tokens"],
            views["stop_ids"],
            views["max_new_tokens"],
        )
        self._rows.commit(views)

    def _with_logits(self, views: Views, name: str) -> Views:
        return {**views, "logits": views[name]} if self._custom else views


def make_steps(
    decoder: Decoder,
    opset: OpSet,
    verify: GreedyVerify,
    buffers: StaticBuffers,
    state: DeviceRows,
    *,
    rejection: bool,
) -> dict[str, Callable[[Views], None]]:
    """What a cell of each tier runs. A graph of a whole step is one of both halves."""
    rows = opset.row_ops(state, decoder.rope.block_size)
    forward, ops = Forward(decoder, rows), decoder.ops
    sampler, logprobs = opset.sampler(state.sampler, rejection=rejection), opset.logprobs()

    def step(choose: Choose) -> Callable[[Views], None]:
        def both(views: Views) -> None:
            forward(views)
            choose(views)

        return both

    return {
        GREEDY: step(Choose(ops, None, None, verify, rows, buffers)),
        SAMPLED: step(Choose(ops, sampler, None, verify, rows, buffers)),
        LOGPROBS: step(Choose(ops, sampler, logprobs, verify, rows, buffers)),
        LOGITS: forward,
        CUSTOM: Choose(ops, sampler, logprobs, verify, rows, buffers, custom=True),
    }


def _input(
    name: str,
    shape: tuple[int | str, ...],
    *,
    dtype: torch.dtype = torch.int32,
    fill: int = 0,
    cells_only: bool = False,
) -> BufferSpec:
    return BufferSpec(
        name=name, shape=shape, dtype=dtype, role="input", fill=fill, cells_only=cells_only
    )


def _numbers(name: str, shape: tuple[int | str, ...]) -> BufferSpec:
    return BufferSpec(name=name, shape=shape, dtype=torch.int32, role="scratch", cells_only=True)


def _output(name: str, shape: tuple[int | str, ...], dtype: torch.dtype) -> BufferSpec:
    return BufferSpec(name=name, shape=shape, dtype=dtype, role="output", cells_only=True)


def _activation(name: str, width: int) -> BufferSpec:
    return BufferSpec(name=name, shape=("T", width), dtype=torch.float32, role="scratch")
