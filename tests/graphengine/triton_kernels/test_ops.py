"""TritonOps and TritonDraftOps beside the native ones, and replayed from a tape."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from capture.ops import PythonOp, set_recorder
from capture.stream import InlineStream
from capture.tape import Tape
from graphengine.device_rows import DeviceRows
from graphengine.draft_ops import NativeDraftOps
from graphengine.models.hidden_states import HiddenStates
from graphengine.models.layers import LayerOps, Rope
from graphengine.models.native_ops import NativeOps
from graphengine.models.triton_ops import TritonOps
from graphengine.triton_draft_ops import TritonDraftOps
from graphengine.triton_kernels.gemm import scratch_floats
from graphengine.triton_kernels.rows import argmax_floats, store_slots
from proposers.base import RequestSampling
from proposers.device import DraftOps
from proposers.requests import WORDS, write_requests
from tests.graphengine.kernels.calls import empty

EPS = 1e-5
ROWS, HIDDEN, VOCAB, WIDE = 6, 32, 40, 24
HEADS, KV_HEADS, DIM, BLOCK_SIZE, BLOCKS = 3, 1, 16, 4, 4
QKV = (HEADS + 2 * KV_HEADS) * DIM
# Products are summed in another order, and an exp is another.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
Results = dict[str, Tensor]


def seeded(*shape: int) -> Tensor:
    """The same numbers for every form."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def triton_ops() -> TritonOps:
    shapes = [(QKV, HIDDEN), (2 * WIDE, HIDDEN), (HIDDEN, WIDE), (VOCAB, HIDDEN), (HIDDEN, 64)]
    floats = max(scratch_floats(ROWS, shapes), argmax_floats(ROWS, VOCAB))
    return TritonOps(EPS, empty(floats))


def layer_step(ops: LayerOps, *, normed: bool) -> tuple[Callable[[], None], Results]:
    """Every layer op, each reading what one before it has written; and where results lie."""
    angles = seeded(20, DIM // 2)
    rope = Rope(angles.cos(), angles.sin(), HEADS, KV_HEADS, DIM, BLOCK_SIZE)
    norms = (seeded(DIM), seeded(1, DIM)[0]) if normed else None
    ids, positions, slots = (
        integers(3, 0, 39, 3, 7, 8),
        integers(0, 1, 2, 19, 4, 0),
        integers(4, 5, 6, 15, 8, 0),
    )
    weights = {
        "embed": seeded(VOCAB, HIDDEN),
        "norm": seeded(HIDDEN),
        "qkv": seeded(QKV, HIDDEN),
        "bias": seeded(QKV),
        "gate_up": seeded(2 * WIDE, HIDDEN),
        "down": seeded(HIDDEN, WIDE),
    }
    out = {
        "hidden": empty(ROWS, HIDDEN),
        "x": empty(ROWS, HIDDEN),
        "qkv": empty(ROWS, QKV),
        "cache": torch.zeros(BLOCKS, 2, BLOCK_SIZE, KV_HEADS, DIM),
        "activated": empty(ROWS, WIDE),
        "logits": empty(ROWS, VOCAB),
        "ids": empty(ROWS, dtype=torch.int32),
    }

    def step() -> None:
        ops.embed(out["hidden"], weights["embed"], ids)
        ops.rms_norm(out["x"], out["hidden"], weights["norm"])
        ops.linear(out["qkv"], out["x"], weights["qkv"], weights["bias"])
        ops.rope_write(out["qkv"], out["cache"], rope, positions, slots, norms)
        ops.gate_up(out["activated"], out["x"], weights["gate_up"])
        ops.linear(out["hidden"], out["activated"], weights["down"], add=True)
        ops.rms_norm(out["hidden"], out["hidden"], weights["norm"])
        ops.linear(out["logits"], out["hidden"], weights["embed"])
        ops.argmax(out["ids"], out["logits"])

    return step, out


def native_draft_ops(states: HiddenStates) -> NativeDraftOps:
    ops = NativeOps(torch.float32, EPS)
    return NativeDraftOps(
        ops, states, device_rows(), block_size=BLOCK_SIZE, draft_sampling="coupled"
    )


def triton_draft_ops(states: HiddenStates | None) -> TritonDraftOps:
    return TritonDraftOps(
        triton_ops(), states, device_rows(), block_size=BLOCK_SIZE, draft_sampling="coupled"
    )


def device_rows() -> DeviceRows:
    return DeviceRows(
        max_num_seqs=2,
        max_model_len=16,
        vocab_size=VOCAB,
        device=torch.device("cpu"),
        stream=InlineStream(),
    )


def hidden_states() -> HiddenStates:
    return HiddenStates(
        (1, "final"),
        hidden_size=HIDDEN,
        num_blocks=BLOCKS,
        block_size=BLOCK_SIZE,
        dtype=torch.float32,
        device=torch.device("cpu"),
        store=PythonOp("store_slots", store_slots),
    )


def draft_step(ops: DraftOps, states: HiddenStates) -> tuple[Callable[[], None], Results]:
    """Every draft op, with hidden states that the step itself has stored."""
    slots, last_rows = integers(4, 5, 6, 9, 0, 0), integers(2, 3)
    requests = torch.zeros(2, WORDS, dtype=torch.int32)
    sampling = [RequestSampling(temperature=0.7, seed=5), RequestSampling(temperature=0, seed=1)]
    write_requests(requests.numpy(), sampling, [10, 11])
    head, x = seeded(VOCAB, HIDDEN), seeded(ROWS, HIDDEN)
    logits = empty(2, VOCAB)  # what a choice leaves in them is its own affair
    out = {
        "taps": empty(ROWS, 2 * HIDDEN),
        "embedded": empty(ROWS, HIDDEN),
        "joined": empty(ROWS, 3 * HIDDEN),
        "state": empty(2, 3 * HIDDEN),
        "chosen": empty(2, dtype=torch.int32),
        "drafts": empty(6, dtype=torch.int32),
        "shifted": empty(ROWS, dtype=torch.int32),
    }
    tokens, positions = integers(1, 2, 3, 4, 0, 0), integers(0, 1, 2, 5, 0, 0)

    def step() -> None:
        states.store(1, x, slots)
        states.store("final", x, slots)
        states.store(0, out["embedded"], slots)  # nobody wants it
        ops.load_slots(out["taps"], slots)
        ops.embed(out["embedded"], head, tokens)
        ops.zero_first(out["embedded"], positions)
        ops.concat(out["joined"], out["embedded"], out["taps"])
        ops.take_rows(out["state"], out["joined"], last_rows)
        ops.linear(logits, seeded(2, HIDDEN), head)
        ops.choose(out["chosen"], out["drafts"], None, logits, None, requests, 1)
        ops.shift_tokens(out["shifted"], tokens, last_rows, out["chosen"])

    return step, out


def check_against(step: Callable[[], None], out: Results, expected: Results) -> None:
    """The step as it is, then its tape, from what there was before."""
    before = {name: tensor.clone() for name, tensor in out.items()}
    step()
    for name, wanted in expected.items():
        torch.testing.assert_close(out[name], wanted, **TOLERANCE)
    direct = {name: tensor.clone() for name, tensor in out.items()}
    tape = Tape()
    set_recorder(tape)
    try:
        step()
    finally:
        set_recorder(None)
    for name, tensor in out.items():
        tensor.copy_(before[name])
    for call in tape.calls:
        call.op.run(*call.args)
    for name, wanted in direct.items():
        assert torch.equal(out[name], wanted), name


@pytest.mark.parametrize("normed", [False, True])
def test_layer_ops_are_those_of_the_cpu(normed: bool) -> None:
    """An argument in another's place, an op that no tape sees."""
    native, expected = layer_step(NativeOps(torch.float32, EPS), normed=normed)
    native()
    step, out = layer_step(triton_ops(), normed=normed)
    check_against(step, out, expected)


def test_draft_ops_are_those_of_the_cpu() -> None:
    """An argument in another's place, an op that no tape sees; states kept by what keeps them."""
    states = hidden_states()
    native, expected = draft_step(native_draft_ops(states), states)
    native()
    assert not states.storage[:BLOCK_SIZE].any()
    other = hidden_states()
    ops = triton_draft_ops(other)
    step, out = draft_step(ops, other)
    check_against(step, out, expected)


def test_a_draft_model_reads_no_hidden_states() -> None:
    """Of a target that keeps none; to read them would be a mistake of the proposer."""
    ops = triton_draft_ops(None)
    with pytest.raises(AssertionError, match="keeps no hidden states"):
        ops.load_slots(empty(1, HIDDEN), integers(4))
