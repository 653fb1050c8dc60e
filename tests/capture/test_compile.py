"""PieceCompiler: compiled once, every compile an event, none after warm-up, found again on disk.

Compiling is slow, so one piece is compiled for the module and each test adds as little as it can.
"""

import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from capture.compile import PieceCompiler
from capture.config import CaptureConfig
from capture.ops import PythonOp
from graphengine.kernels import library
from tests.capture.helpers import TIER, WIDTH, bits, fill_inputs, make_manager, outputs

Tensor = torch.Tensor
ROOT = Path(__file__).parents[2]


def scale(out: Tensor, x: Tensor) -> None:
    out.copy_(torch.sigmoid(x) * 3 + x.sum(-1, keepdim=True))


def run(op: PythonOp, rows: int, width: int = WIDTH) -> None:
    """Call the piece and hold it to the function."""
    x = torch.randn(rows, width)
    out, expected = torch.full_like(x, float("nan")), torch.empty_like(x)
    op(out, x)
    scale(expected, x)
    torch.testing.assert_close(out, expected)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    library.load()  # from the user's cache: the kernels need not be built again
    directory = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAPHENGINE_CACHE_DIR", str(directory))
        yield directory


@pytest.fixture(scope="module")
def warm(cache: Path) -> tuple[PieceCompiler, PythonOp]:
    """The module's one cold compile: of two rows or more, and of one row."""
    compiler = PieceCompiler("inductor")
    op = compiler.piece("scale", scale, dynamic_rows=(0, 1))
    for rows in (4, 1, 2, 7):
        run(op, rows)
    compiler.finish_warmup()
    return compiler, op


def test_one_compile_serves_all_rows(warm: tuple[PieceCompiler, PythonOp]) -> None:
    """Guards case 14: one event for many rows and one for one row, none after warm-up."""
    compiler, op = warm
    before = list(compiler.events)
    for rows in range(1, 50):
        run(op, rows)
    assert compiler.events == before
    assert [(event.piece, event.after_warmup) for event in before] == [("scale", False)] * 2
    assert all(event.seconds > 0 for event in before)
    assert not any(event.cache_hit for event in before)


def test_the_cache_is_where_the_variable_says(
    cache: Path, warm: tuple[PieceCompiler, PythonOp]
) -> None:
    assert list((cache / "inductor").glob("*/*.so"))
    assert json.loads((cache / "inductor" / "manifest.json").read_text())
    assert str(cache) not in os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")


def test_a_second_engine_counts_its_own_events_and_hits_the_cache(
    warm: tuple[PieceCompiler, PythonOp],
) -> None:
    """Guards against pieces of several engines that use up one another's compile limit."""
    first = list(warm[0].events)
    compiler = PieceCompiler("inductor")
    op = compiler.piece("scale", scale, dynamic_rows=(0, 1))
    run(op, 3)
    assert [(event.piece, event.cache_hit) for event in compiler.events] == [("scale", True)]
    assert warm[0].events == first


def test_a_shape_that_was_never_compiled_is_an_event_after_warmup(
    warm: tuple[PieceCompiler, PythonOp],
) -> None:
    """Guards case 14: a recompile in the middle of serving is counted and flagged."""
    compiler = PieceCompiler("inductor")
    op = compiler.piece("scale", scale, dynamic_rows=(0, 1))
    run(op, 4)
    compiler.finish_warmup()
    run(op, 1)
    assert [event.after_warmup for event in compiler.events] == [False, True]


@pytest.mark.parity
@pytest.mark.parametrize("kind", ["eager", "compiled", "tape"])
def test_every_graph_kind_gives_the_bits_of_the_compiled_piece(
    warm: tuple[PieceCompiler, PythonOp], kind: Any
) -> None:
    """Guards graph kinds over real compiled ops, and case 14 over the whole grid."""
    compiler = PieceCompiler("inductor")
    op = compiler.piece("scale", scale, dynamic_rows=(0, 1))
    config = CaptureConfig(graph=kind, num_reqs=(1, 3))
    manager, bench = make_manager(config, max_num_seqs=4)
    bench.step.norm = lambda views: op(views["normed"], views["x"])
    manager.capture_all()
    compiler.finish_warmup()
    for num_reqs in range(1, 5):
        for drafts in range(4):
            key = manager.dispatch(num_reqs, drafts, TIER)
            expected = bits(bench.eager(key, num_reqs, seed=num_reqs))
            fill_inputs(bench.buffers, key, num_reqs, seed=num_reqs)
            manager.replay(key, num_reqs=num_reqs, num_tokens=num_reqs * key.query_len)
            assert bits(outputs(bench.buffers, key)) == expected
    assert [event.after_warmup for event in compiler.events] == [False, False]
    assert "1x1:greedy" in manager.stats.replays, "one row was not part of it"


def test_mode_off_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHENGINE_CACHE_DIR", str(tmp_path / "cache"))
    compiler = PieceCompiler("off")
    op = compiler.piece("scale", scale, dynamic_rows=(0, 1))
    for rows in (1, 2, 5):
        run(op, rows)
    compiler.finish_warmup()
    run(op, 9, width=3)
    assert compiler.events == []
    assert not (tmp_path / "cache").exists()


SCRIPT = f"""
import torch
from torch import Tensor
from capture.compile import PieceCompiler
{inspect.getsource(scale)}
compiler = PieceCompiler("inductor")
op = compiler.piece("scale", scale, dynamic_rows=(0, 1))
op(torch.empty(4, {WIDTH}), torch.randn(4, {WIDTH}))
print("HIT" if compiler.events[0].cache_hit else "MISS", len(compiler.events))
"""


def test_another_process_starts_warm(cache: Path, warm: tuple[PieceCompiler, PythonOp]) -> None:
    """Guards case 58: a start that throws away what the last one compiled."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "GRAPHENGINE_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "HIT 1", done.stderr


def test_a_damaged_cache_is_rebuilt(
    cache: Path,
    warm: tuple[PieceCompiler, PythonOp],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Guards case 58 with real files: a copy of the warm cache, its binaries cut short."""
    shutil.copytree(cache, tmp_path / "copy")
    monkeypatch.setenv("GRAPHENGINE_CACHE_DIR", str(tmp_path / "copy"))
    intact = PieceCompiler("inductor")
    run(intact.piece("scale", scale, dynamic_rows=(0, 1)), 4)
    assert [event.cache_hit for event in intact.events] == [True]
    shutil.copytree(cache, tmp_path / "cut")
    for path in (tmp_path / "cut" / "inductor").glob("*/*.so"):
        os.truncate(path, 5000)
    monkeypatch.setenv("GRAPHENGINE_CACHE_DIR", str(tmp_path / "cut"))
    compiler = PieceCompiler("inductor")
    run(compiler.piece("scale", scale, dynamic_rows=(0, 1)), 4)
    assert "damaged or unfinished; rebuilding it" in caplog.text
    assert [event.cache_hit for event in compiler.events] == [False]
