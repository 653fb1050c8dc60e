"""Graph against eager on the CPU, for real: what a trace counts is what the engine launches."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from capture.ops import NativeOp
from graphengine.tracing import PREFILL, STEP, VERIFY
from profiles import copy_ceiling, graph_vs_eager
from profiles.step_engine import fill, open_engine
from profiles.torch_trace import GRAPH_LAUNCH, LAUNCH, programs_named
from tests.tiny import make_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


def _options(checkpoint: Path, **more: object) -> SimpleNamespace:
    options = {"model": str(checkpoint), "dtype": "auto", "device": "cpu", "context": 8}
    options["compile"] = "auto"
    return SimpleNamespace(**{**options, "speculate": "junk", "draft_model": None, **more})


def test_modes_differ_in_launches_alone(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Guards against a mode that runs as another, and counts that the profiler made up."""
    out, run = tmp_path / "out.json", NativeOp.run
    arguments = ["--model", checkpoint, "--batch", "1,2", "--k", "0,2", "--turns", "6"]
    arguments += ["--steps", "2", "--context", "8", "--note", "a test", "--out", out]
    monkeypatch.setattr(sys, "argv", ["graph_vs_eager", *map(str, arguments)])
    assert graph_vs_eager.main() == 0
    assert NativeOp.run is run
    data = json.loads(out.read_text())
    shapes = [(row["batch_size"], row["k"], row["mode"]) for row in data["rows"]]
    modes = ("eager", "compiled", "tape")
    assert shapes == [(batch, k, mode) for batch in (1, 2) for k in (0, 2) for mode in modes]
    for eager, compiled, tape in zip(*[iter(data["rows"])] * 3, strict=True):
        totals = [row["profile"]["total"] for row in (eager, compiled, tape)]
        counts = [(one["launches"], one["graph_launches"]) for one in totals]
        assert counts == [(counts[0][0], 0), (counts[0][0], 0), (0, 1)]
        assert counts[0][0] > 20  # two layers, and what is before and behind them
        assert totals[0]["ops"] > totals[1]["ops"] == totals[2]["ops"]  # views made anew
        for row, total in zip((eager, compiled, tape), totals, strict=True):
            assert 0 < total["device_us"] <= total["host_us"]
            phases = {one["phase"]: one for one in row["profile"]["rows"]}
            assert phases[VERIFY]["device_us"] == total["device_us"]
            assert PREFILL not in phases  # all of it was before
            assert row["ratio"]["num_values"] == 6
        assert (eager["ratio"]["low"], eager["ratio"]["high"]) == (1, 1)
    text = out.with_suffix(".md").read_text()
    assert text.count("\n## batch") == 12
    assert "a test" in text
    assert 5_000 < out.with_suffix(".png").stat().st_size < 200_000
    lines = capsys.readouterr().out.splitlines()
    assert len({one.count("|") for one in lines if one.startswith("|")}) == 1


def test_a_program_says_how_many_calls_it_is(checkpoint: Path) -> None:
    """Guards against a tape that leaves out what the eager step calls."""
    with programs_named():
        engines = {
            mode: open_engine(_options(checkpoint), mode, [1], [1], 9) for mode in ("eager", "tape")
        }
    traces = {}
    for mode, engine in engines.items():
        fill(engine, 1, 1, 8, 1)
        traces[mode] = graph_vs_eager.trace_steps(engine, 2)
        engine.close()
    called = [one for one in traces["eager"] if one.name.startswith(LAUNCH)]
    programs = {one.name for one in traces["tape"] if one.name.startswith(GRAPH_LAUNCH)}
    assert programs == {f"{GRAPH_LAUNCH}of {len(called) // 2} calls"}
    assert sum(one.name == STEP for one in traces["tape"]) == 2


def test_modes_that_disagree_are_no_result(checkpoint: Path) -> None:
    """Guards against a faster mode that computes something else."""
    engines = {}
    for mode in ("eager", "tape"):
        engines[mode] = open_engine(_options(checkpoint), mode, [1], [0], 9)
        fill(engines[mode], 1, 0, 8, 1)
    graph_vs_eager.check_same(engines)
    engines["tape"].step()
    with pytest.raises(RuntimeError, match="tape and eager emitted different tokens"):
        graph_vs_eager.check_same(engines)
    for engine in engines.values():
        engine.close()


def test_every_step_drafts_k_tokens(checkpoint: Path) -> None:
    """Guards against a proposer that has nothing to say, so that steps are plain ones."""
    engine = open_engine(_options(checkpoint), "eager", [2], [3], 9)
    fill(engine, 2, 3, 8, 2)
    before = engine.stats()
    engine.step()
    after = engine.stats()
    assert after.num_draft_tokens - before.num_draft_tokens == 2 * 3
    assert after.replays["2x4:greedy"] - before.replays.get("2x4:greedy", 0) == 1
    engine.close()


def test_the_copy_copies() -> None:
    """Guards against a ceiling of a kernel that moves half of what is counted."""
    pytest.importorskip("triton")
    x = torch.arange(copy_ceiling.BLOCK + 7, dtype=torch.float32)
    out = torch.zeros_like(x)
    copy_ceiling.copy(out, x)
    assert torch.equal(out, x)
