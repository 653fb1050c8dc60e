"""The opaque op: what torch.compile, opcheck and a recorder see of FlashInfer attention."""

import gc

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from capture.ops import Arg, Op, set_recorder
from graphengine.attention import flashinfer as backend
from tests.graphengine.attention.flashinfer_double import (
    NativeDouble,
    make_attention,
    make_rows,
)

Tensor = torch.Tensor


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_fullgraph_compiles_around_it(native: NativeDouble, compiler: str) -> None:
    """FlashInfer's own functions break the graph; a compiled step must hold one, and must see that
    the op writes `out`. Plans made later reach it without another compilation.
    """
    attention = make_attention()
    first, later = make_rows([(5, 2), (9, 2)]), make_rows([(11, 2), (0, 2)])

    def step(out: Tensor, qkv: Tensor, cache: Tensor) -> Tensor:
        qkv = qkv * 2.0
        attention.run(out, qkv, cache, first.batch)
        return out + 1.0

    counter = CompileCounterWithBackend(compiler)
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for rows in (first, later, first):
        attention.plan(rows.batch, rows.host)
        out = rows.out()
        result = compiled(out, rows.qkv, rows.cache)
        expected = rows.out()
        attention.run(expected, rows.qkv * 2.0, rows.cache, rows.batch)
        assert torch.equal(out, expected)
        assert torch.equal(result, expected + 1.0)
    assert counter.frame_count == 1


def test_the_op_says_what_it_does(native: NativeDouble) -> None:
    """Schema, fake kernel and mutation agree, with static and with dynamic shapes."""
    rows, attention = make_rows([(5, 2), (9, 2)]), make_attention()
    attention.plan(rows.batch, rows.host)
    handle = next(number for number, one in backend._backends.items() if one is attention)
    torch.library.opcheck(
        torch.ops.graphengine.flashinfer_attention.default,
        (rows.out().zero_(), rows.qkv, rows.cache, 2, 2, handle),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


def test_a_recorder_sees_one_op_with_its_storages(native: NativeDouble) -> None:
    """A tape replays the call: its arguments are all it has, and each must be one it can keep."""
    seen: list[tuple[Op, tuple[Arg, ...]]] = []

    class Recorder:
        def record(self, op: Op, args: tuple[Arg, ...]) -> None:
            seen.append((op, args))

    rows, attention = make_rows([(5, 2), (9, 2)]), make_attention()
    attention.plan(rows.batch, rows.host)
    out = rows.out()
    set_recorder(Recorder())
    try:
        attention.run(out, rows.qkv, rows.cache, rows.batch)
    finally:
        set_recorder(None)
    assert out.isnan().all(), "a recording runs nothing"
    ((op, args),) = seen
    assert op.name == "flashinfer_attention"
    assert args == (out, rows.qkv, rows.cache, 2, 2)
    op.run(*args)
    assert torch.equal(out, rows.reference())


def test_two_backends_keep_their_own_plans(native: NativeDouble) -> None:
    """Target and draft have one each; the latest plan of one is not that of the other."""
    target, draft = make_attention(), make_attention()
    one, two = make_rows([(5, 2)]), make_rows([(9, 2)])
    target.plan(one.batch, one.host)
    draft.plan(two.batch, two.host)
    out = one.out()
    target.run(out, one.qkv, one.cache, one.batch)
    assert torch.equal(out, one.reference())


def test_a_closed_backend_is_freed(native: NativeDouble) -> None:
    """The table of backends must not keep an engine's buffers alive."""
    gc.collect()
    before = len(backend._backends)
    attention, rows = make_attention(), make_rows([(5, 2)])
    attention.plan(rows.batch, rows.host)
    assert len(backend._backends) == before + 1
    del attention
    gc.collect()
    assert len(backend._backends) == before
