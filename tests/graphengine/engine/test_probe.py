"""The start-up probe: it passes on the real pieces, and finds a planted dependence in each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from graphengine.attention.base import AttentionBatch
from graphengine.engine import Engine
from graphengine.numerics import ProbeReport, check_row_invariance
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.setups import Setup

Tensor = torch.Tensor


@pytest.fixture(scope="module")
def engine(checkpoints: Checkpoints) -> Iterator[Engine]:
    engine = Setup(k=3, max_num_seqs=6, max_model_len=400).start(checkpoints.get("qwen3"))
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def _nothing_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHENGINE_CACHE_DIR", str(tmp_path))


def probe(engine: Engine, verify: Callable[..., None] | None = None) -> ProbeReport:
    runner, shape = engine.runner, engine.runner.verifier_shape
    if verify is not None:
        shape = type(shape)(
            verify=verify,
            num_rows=shape.num_rows,
            max_draft_tokens=shape.max_draft_tokens,
            num_target_ids=shape.num_target_ids,
            num_token_ids=shape.num_token_ids,
        )
    return check_row_invariance(
        runner.decoder, shape, row_counts=[1, 2, 5, 24], max_model_len=400, compile_mode="native"
    )


def test_the_real_pieces_pass_and_the_pass_is_remembered(engine: Engine) -> None:
    assert not probe(engine).cached
    assert probe(engine).cached


def test_attention_that_looks_at_other_requests_is_found(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request in a call cannot show a schedule that depends on how many there are."""
    attention = engine.runner.decoder.attention
    run = attention.run

    def run_and_mix(out: Tensor, qkv: Tensor, cache: Tensor, batch: AttentionBatch) -> None:
        run(out, qkv, cache, batch)
        if len(batch.block_table) > 1 and int(batch.positions.max()) > 128:
            out[0] *= 1 + 2**-20

    monkeypatch.setattr(attention, "run", run_and_mix)
    with pytest.raises(ValueError, match="attention of several requests gives a row other bits"):
        probe(engine)


def test_a_verifier_that_looks_at_other_rows_is_found(engine: Engine) -> None:
    """Integers too depend on their neighbours where a row is gathered from the wrong place."""
    verify = engine.runner.verifier

    def verify_neighbour(packed: Tensor, targets: Tensor, tokens: Tensor, *rest: Any) -> None:
        query_len, num_drafts, *others = rest
        verify(packed, targets, tokens, query_len, num_drafts.roll(1), *others)

    with pytest.raises(ValueError, match="verifier gives a row other bits"):
        probe(engine, verify_neighbour)


def test_a_linear_that_depends_on_the_row_count_is_found(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the comparison itself, for a piece of rows."""
    ops = engine.runner.decoder.ops
    linear = ops.linear

    def uneven(out: Tensor, x: Tensor, *rest: Any, **options: Any) -> None:
        linear(out, x, *rest, **options)
        if len(x) == 5:
            out[-1] += 1e-4

    monkeypatch.setattr(ops, "linear", uneven)
    with pytest.raises(ValueError, match="linear qkv gives a row other bits among 5 rows"):
        probe(engine)
