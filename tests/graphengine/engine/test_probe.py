"""The start-up probe: it passes on the real pieces, and finds a planted dependence in each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from graphengine.attention.base import AttentionBatch
from graphengine.engine import Engine
from graphengine.models.layers import LayerOps
from graphengine.numerics import ProbeReport, check_row_invariance
from graphengine.probe import problems
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
        runner.decoder, runner.opset, shape, row_counts=[1, 2, 5, 24], max_model_len=400
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


def plant(patch: pytest.MonkeyPatch, engine: Engine, piece: str) -> None:
    """Make a row of the piece depend on how many there are: the last of five is another."""
    decoder = engine.runner.decoder
    method = piece.split()[0]
    owner, method = (decoder.attention, "run") if method == "attention" else (decoder.ops, method)
    layer = decoder.weights.layers[0]
    weights = {
        "linear qkv": layer.qkv,
        "linear o": layer.o,
        "linear down": layer.down,
        "linear lm_head": decoder.weights.lm_head,
    }
    sound = getattr(owner, method)

    def uneven(out: Tensor, x: Tensor, *rest: Any, **options: Any) -> None:
        sound(out, x, *rest, **options)
        if len(out) == 5 and (piece not in weights or rest[0] is weights[piece]):
            out[-1] += 1 if out.dtype == torch.int32 else 2**-10

    patch.setattr(owner, method, uneven)


LINEARS = ("linear qkv", "linear o", "linear down", "linear lm_head")
PIECES = ("embed", "rms_norm", "gate_up", "argmax", *LINEARS, "rope_write", "attention")


@pytest.mark.parametrize("piece", PIECES)
def test_a_piece_that_depends_on_the_row_count_is_found(piece: str, engine: Engine) -> None:
    """A piece that the probe does not look at, or blames on another; a failure that is kept."""
    name = "attention" if piece == "rope_write" else piece  # one problem has both
    message = f"{name} gives a row other bits among 5 rows than among 24 on this machine"
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, engine, piece)
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                probe(engine)
    assert not probe(engine).cached, "the failure was remembered"
    assert probe(engine).cached


def test_every_piece_of_the_step_is_probed(engine: Engine) -> None:
    """A new piece that nobody probes."""
    runner = engine.runner
    shape = runner.verifier_shape
    found = problems(runner.decoder, runner.opset, shape, rows=8, max_model_len=400)
    probed = {one.name for one in found}
    others = {"attention of several requests", "sampler", "verifier"}
    assert probed == {*PIECES} - {"rope_write"} | others
    operations = {name for name in vars(LayerOps) if not name.startswith("_")}
    assert operations == {piece.split()[0] for piece in PIECES} - {"attention"}
