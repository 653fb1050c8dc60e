"""From logits to emitted tokens over eight token ids: the step's own code against plain loops.

Real rows, real input preparation, real kernels; only the logits and the drafts are made up. What is
right is `sampling/reference.py` row by row and `verify_reference` over the rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from capture.buffers import StaticBuffers
from capture.shapes import ShapeKey
from graphengine import step_batch
from graphengine.captured_step import Choose, make_buffers
from graphengine.device_rows import DeviceRows
from graphengine.models.loader import open_model
from graphengine.models.native_ops import NativeOps
from graphengine.request import Request
from graphengine.request_state import RequestState
from graphengine.resolve import SAMPLED, RunnerSizes
from graphengine.row_ops import NativeRowOps
from graphengine.sampling.cpu import NativeGreedyVerify, NativeSampler
from graphengine.sampling.params import SamplingParams
from graphengine.sampling.reference import RowSettings, process, reject, sample
from graphengine.sampling.verifier import verify_reference
from tests.graphengine.engine.checkpoints import Checkpoints

VOCAB, EOS, K, MAX_NUM_SEQS = 8, 7, 3, 3
SIZES = RunnerSizes(
    max_num_seqs=MAX_NUM_SEQS, max_draft_tokens=K, max_model_len=64, block_size=4, rejection=True
)
IDS = st.integers(0, VOCAB - 1)
Probs = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One request of a batch, and what its block is about to hear."""

    prompt: list[int]
    output: list[int]
    params: SamplingParams
    drafts: list[int]
    logits: npt.NDArray[np.float32]  # [K + 1, VOCAB]


@st.composite
def rows(draw: Any) -> Row:
    temperature = draw(st.sampled_from([0.0, 0.5, 1.0, 1.0, 40.0]))
    allowed = draw(st.none() | st.sets(IDS, min_size=2))
    min_tokens = draw(st.sampled_from([0, 0, 2, 5]))
    params = SamplingParams(
        max_tokens=draw(st.integers(max(1, min_tokens), 12)),
        min_tokens=min_tokens,
        temperature=temperature,
        top_k=draw(st.sampled_from([0, 0, 3])),
        top_p=draw(st.sampled_from([1.0, 0.7])),
        min_p=draw(st.sampled_from([0.0, 0.2])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.5])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, -0.5])),
        logit_bias=draw(st.dictionaries(IDS, st.sampled_from([-2.0, 3.0]), max_size=2)),
        allowed_token_ids=None if allowed is None else tuple(sorted({*allowed, 0})),
        stop_token_ids=draw(st.lists(st.integers(3, 5), max_size=1)),
        seed=draw(st.integers(0, (1 << 64) - 1)),
    )
    most = (params.max_tokens or 1) - 1
    output = draw(st.lists(st.integers(0, 2), max_size=min(most, 6)))
    room = min(K, most - len(output))
    number = st.floats(-4, 4, width=32)
    logits = draw(st.lists(number, min_size=(K + 1) * VOCAB, max_size=(K + 1) * VOCAB))
    return Row(
        prompt=draw(st.lists(IDS, min_size=1, max_size=4)),
        output=output,
        params=params,
        drafts=draw(st.lists(IDS, max_size=room)),
        logits=np.array(logits, dtype=np.float32).reshape(K + 1, VOCAB),
    )


@cache
def made_buffers(checkpoint: Path, sizes: RunnerSizes) -> StaticBuffers:
    """Those of an engine, but for so few token ids."""
    model = replace(open_model(checkpoint).config, vocab_size=VOCAB, eos_token_ids=(EOS,))
    return make_buffers(model, sizes, torch.device("cpu"))


def request_of(row: Row, index: int) -> Request:
    request = Request(
        str(index), row.prompt, row.params, max_model_len=64, eos_token_ids=(EOS,), choice=index
    )
    request.row, request.admission = MAX_NUM_SEQS - 1 - index, index
    return request


def emitted(
    batch: list[Row],
    probs: npt.NDArray[np.float32] | None,
    sizes: RunnerSizes,
    buffers: StaticBuffers,
) -> list[tuple[list[int], int]]:
    """By the step's own code."""
    state = RequestState(
        max_num_seqs=MAX_NUM_SEQS, max_model_len=64, block_size=4, vocab_size=VOCAB
    )
    requests = [request_of(row, index) for index, row in enumerate(batch)]
    for request, row in zip(requests, batch, strict=True):
        request.token_ids.extend(row.output)
        state.follow(request)
    lengths = np.array([len(row.drafts) for row in batch], dtype=np.int32)
    drafts = np.full((len(batch), K), -1, dtype=np.int32)
    for place, row in enumerate(batch):
        drafts[place, : len(row.drafts)] = row.drafts
    key = ShapeKey(MAX_NUM_SEQS, K + 1, SAMPLED)
    views = buffers.cell(key)
    names = (*step_batch.SAMPLED_INPUTS, *step_batch.REJECTION_INPUTS)
    written = names if sizes.rejection else step_batch.SAMPLED_INPUTS
    host = {name: views[name].numpy() for name in written}
    stepped = step_batch.DecodeBatch(requests, drafts, lengths, probs)
    step_batch.write_decode(host, key, state, stepped)
    step_batch.write_sampled(host, key, state, stepped)
    if sizes.rejection:
        step_batch.write_draft_probs(host, key, stepped)
    logits = views["logits"].view(MAX_NUM_SEQS, K + 1, VOCAB)
    logits.fill_(float("nan"))
    logits[: len(batch)] = torch.from_numpy(np.stack([row.logits for row in batch]))
    sampler = NativeSampler(state.device.sampler, rejection=sizes.rejection)
    ops, rows = NativeOps(torch.float32, 1e-5), NativeRowOps(state.device, 4)
    rows.prepare(views)
    Choose(ops, sampler, None, NativeGreedyVerify(), rows, buffers)(views)
    packed = buffers.whole("packed").view(-1, K + 3)[: len(batch)].tolist()
    blocks = [(row[2 : 2 + row[0]], row[1]) for row in packed]
    for request, row, (emitted, _) in zip(requests, batch, blocks, strict=True):
        check_row(state.device, state.row_of(request), row, emitted)
    return blocks


def check_row(device: DeviceRows, place: int, row: Row, emitted: list[int]) -> None:
    """The device's row of a request has what the step emitted, and counts it."""
    known = [*row.prompt, *row.output, *emitted]
    assert device.token_ids[place, : int(device.num_tokens[place])].tolist() == known
    if row.params.has_penalties:
        counted = np.bincount([*row.output, *emitted], minlength=VOCAB)
        assert device.sampler.counts[place].tolist() == counted.tolist()


def expected(row: Row, index: int, q: Probs | None, *, rejection: bool) -> tuple[list[int], int]:
    """By plain loops."""
    params = row.params
    stops = {*params.stop_token_ids, EOS}
    fields = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    fields += ("frequency_penalty", "presence_penalty")
    plain = RowSettings(
        **{name: getattr(params, name) for name in fields},
        logit_bias=dict(params.bias),
        seed=params.seed or 0,
        choice=index,
    )
    targets = []
    for offset in range(len(row.drafts) + 1):
        known = [*row.output, *row.drafts[:offset]]
        allowed = set(
            range(VOCAB) if params.allowed_token_ids is None else params.allowed_token_ids
        )
        if len(known) < params.min_tokens:
            allowed -= stops
        rules = replace(plain, allowed=allowed)
        processed = process(row.logits[offset].tolist(), rules, row.prompt, known)
        position = len(row.prompt) + len(known)
        token = sample(processed, rules, position)
        if rejection and params.temperature and offset < len(row.drafts):
            one = None if q is None else q[offset].tolist()
            token = reject(processed, row.drafts[offset], one, rules, position)
        targets.append(token)
    room = (params.max_tokens or 0) - len(row.output)
    return verify_reference(targets, row.drafts, sorted(stops), room)


@given(
    batch=st.lists(rows(), min_size=1, max_size=MAX_NUM_SEQS),
    mode=st.sampled_from(["exact", "rejection", "rejection, drawn"]),
    draws=st.integers(0, 1 << 32),
)
@settings(
    max_examples=300,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_a_block_is_what_plain_loops_make_of_it(
    checkpoints: Checkpoints, batch: list[Row], mode: str, draws: int
) -> None:
    """Ragged drafts, stops, limits, masks and penalties, in both modes, q drawn or certain."""
    sizes = replace(SIZES, rejection=mode != "exact")
    buffers = made_buffers(checkpoints.get(), sizes)
    probs = None
    if mode == "rejection, drawn":
        q = np.random.default_rng(draws).dirichlet(np.full(VOCAB, 0.4), (len(batch), K))
        probs = q.astype(np.float32)
    got = emitted(batch, probs, sizes, buffers)
    for index, row in enumerate(batch):
        q_row = None if probs is None else probs[index]
        assert got[index] == expected(row, index, q_row, rejection=sizes.rejection)
