"""The GPU suite without a GPU: what is run, skipped, cut off and kept; floors and targets."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from profiles import gpu_suite
from profiles.gpu_stages import ORDER
from profiles.gpu_stages.base import Clock, Context, Stage
from profiles.gpu_stages.checks import run_tests
from profiles.gpu_stages.steps import against_floor, open_engine, ratio, time_steps
from profiles.gpu_stages.targets import TARGETS, report
from profiles.gpu_suite import parse, read, run_all, run_stage, start_process
from profiles.inflate import PRESETS

TARGET = Path(__file__).parents[1] / "weights" / "tiny" / "target"


class Runs:
    """Stages that take so many seconds of a clock of their own, and end as they are told to."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, 0.0
        self.ends: dict[str, int | None] = {}

    def start(self, stage: Stage, left: float) -> tuple[int | None, str]:
        self.now += min(stage.seconds, left)
        file = self.folder / f"{stage.name}.json"
        file.write_text(json.dumps({"status": "running", "result": {"kept": stage.name}}))
        return self.ends.get(stage.name, 0), "a traceback"

    def run(self, *names: str, seconds: float = 1000, again: bool = False) -> list[str]:
        stages = [Stage(name=name, about="", seconds=100, run=lambda _: None) for name in names]
        return run_all(
            stages, self.folder, seconds, self.start, again=again, clock=lambda: self.now
        )

    def status(self, name: str) -> Any:
        return read(self.folder / f"{name}.json").get("status")


def test_a_stage_that_fails_loses_nothing_of_the_others(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs.ends = {"b": 1, "c": None}
    assert runs.run("a", "b", "c", "d") == ["a", "b", "c", "d"]
    assert [runs.status(name) for name in "abcd"] == ["ok", "failed", "out of time", "ok"]
    failed = read(tmp_path / "b.json")
    assert (failed["output"], failed["result"]) == ("a traceback", {"kept": "b"})
    assert "output" not in read(tmp_path / "a.json")


def test_a_second_call_goes_on(tmp_path: Path) -> None:
    """What is done is not done again; what ran out of time is."""
    runs = Runs(tmp_path)
    runs.ends = {"b": None}
    assert runs.run("a", "b") == ["a", "b"]
    runs.ends = {}
    assert runs.run("a", "b", "c") == ["b", "c"]
    assert runs.run("a", "b", "c") == []
    assert runs.run("a", again=True) == ["a"]


def test_a_stage_that_would_not_fit_is_not_started(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    assert runs.run("a", "b", "c", seconds=250) == ["a", "b"]
    assert runs.status("c") is None


def test_a_child_that_hangs_or_breaks_is_ended_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of the device ends the process that met it, and no other."""
    child = tmp_path / "child.py"
    child.write_text(
        "import sys, time\nprint('said', flush=True)\ntime.sleep(float(sys.argv[-3]))\n"
    )
    script = f'#!/bin/sh\nshift 2\nexec {sys.executable} {child} "$@"\n'
    program = tmp_path / "python"
    program.write_text(script)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    stage = ORDER[0]
    assert start_process(stage, 20, ["0"]) == (0, "said\n")
    assert start_process(stage, 2, ["60"]) == (None, "said\n")
    status, output = start_process(stage, 20, ["x"])
    assert status == 1
    assert "could not convert string to float" in output


def test_partial_results_are_on_disk_as_they_come(tmp_path: Path) -> None:
    """And the next run of the stage finds them."""

    def breaks(context: Context) -> None:
        context.row("one", {"seconds": 1})
        raise RuntimeError("the device is gone")

    seen = []
    args = parse(["--out", str(tmp_path), "--device", "cpu"])
    with pytest.raises(RuntimeError):
        run_stage(Stage(name="x", about="", seconds=1, run=breaks), args)
    found = read(tmp_path / "x.json")
    assert (found["status"], found["result"]) == ("running", {"rows": {"one": {"seconds": 1}}})
    run_stage(
        Stage(name="x", about="", seconds=1, run=lambda c: seen.append(c.has_row("one"))), args
    )
    assert seen == [True]


def test_an_unknown_stage_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--out", str(tmp_path), "--only", "floor,flor"])
    assert "no stage flor; there are environment" in capsys.readouterr().err


def test_every_stage_has_a_name_of_its_own_and_fits_a_slice() -> None:
    assert len({stage.name for stage in ORDER}) == len(ORDER)
    assert all(0 < stage.seconds <= 300 for stage in ORDER)


def test_tests_that_fail_fail_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And their outcomes are kept, each by its name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text("def test_good(): pass\ndef test_bad(): assert 1 == 2\n")
    context = Context(folder=tmp_path, scratch=tmp_path, model=None, device="cpu")
    arguments = ("-c", "pytest.ini", "test_it.py")
    run_tests(context, *arguments, "-k", "good", marker="not gpu")
    assert context.result["outcomes"] == {"test_it.py::test_good": "PASSED"}
    with pytest.raises(RuntimeError, match=r"(?s)pytest's status 1.*assert 1 == 2"):
        run_tests(context, *arguments, marker="not gpu")
    assert context.result["counts"] == {"PASSED": 1, "FAILED": 1}
    with pytest.raises(RuntimeError, match="pytest's status 5"):  # all were left out
        run_tests(context, *arguments, marker="gpu")


def test_the_arithmetic_of_a_floor() -> None:
    sizes = PRESETS["8b"]
    row = against_floor(sizes, 4, 5, 512, 0.01, 4e12)
    weights = 2 * (32 * sizes.layer_elements + 128256 * 4096)
    kv = 4 * 518 * 2 * 8 * 128 * 32 * 2
    assert row["floor_bytes"] == weights + kv
    assert row["floor_seconds"] == pytest.approx((weights + kv) / 4e12)
    assert row["over_floor"] == pytest.approx(0.01 * 4e12 / (weights + kv))
    assert ratio({0: [1.0] * 9, 5: [1.1] * 9}, 5)["median"] == pytest.approx(1.1)


def test_steps_are_told_apart_by_draft_length() -> None:
    """Each replay is timed once, and given to the length that it had."""
    engine = open_engine(TARGET, "cpu", (2,), (0, 3), 16)
    seen: list[int] = []
    replay = engine.runner.manager.replay

    def spy(key: Any, **named: Any) -> None:
        seen.append(key.query_len - 1)
        replay(key, **named)

    engine.runner.manager.replay = spy  # type: ignore[method-assign]
    device, host = time_steps(engine, 2, (0, 3), 16, 4)
    engine.close()
    assert seen[-10:] == [0, 3] * 5
    for seconds in (device, host):
        assert {k: len(values) for k, values in seconds.items()} == {0: 4, 3: 4}
    assert all(d < h for k in (0, 3) for d, h in zip(device[k], host[k], strict=True))


def test_a_clock_leaves_warm_up_out() -> None:
    calls = []
    seconds = Clock(Context(folder=TARGET, scratch=TARGET, model=None, device="cpu").torch_device)
    assert seconds.seconds(lambda: calls.append(1), turns=4, warm_up=2) >= 0
    assert len(calls) == 6


def test_targets_are_met_missed_or_not_known() -> None:
    """A figure that nobody measured must not read as one that was met."""
    ok = {"status": "ok", "seconds": 1.0}
    steps = {"over_floor": 1.2, "over_plain": {"median": 1.05}, "seconds": 0.004}
    steps |= {"batch_size": 1, "k": 0, "floor_seconds": 0.0035}
    results: dict[str, dict[str, Any]] = {stage.name: {} for stage in ORDER}
    assert report(results).count("not known") == len(TARGETS)
    results["floor"] = {**ok, "result": {"rows": {"1 x 0": steps, "1 x 5": {**steps, "k": 5}}}}
    row = {"ratio": {"median": 0.25}}
    results["graph-vs-eager"] = {**ok, "result": {"rows": {"1 x 0, cuda": row}}}
    results["kernels"] = {"status": "failed", "output": "x\nit | broke", "result": {}}
    text = report(results)
    assert "| 4.00 | MISSED |" in text
    assert "| 1.20 | met |" in text
    assert "| kernels | failed |  | it / broke |" in text
    assert "| 1 | 5 | 4.000 | 3.500 | 1.20 | 1.050 |" in text
    assert text.count("not known") == 3


def test_the_whole_suite_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage in its own process, its file, the page, and a second call with nothing to do."""
    command = ["gpu_suite", "--out", str(tmp_path), "--device", "cpu", "--only", "verify-k5"]
    command += ["--scratch", str(tmp_path / "models")]
    monkeypatch.setattr(sys, "argv", command)
    assert gpu_suite.main() == 0
    found = read(tmp_path / "verify-k5.json")
    assert found["status"] == "ok", found
    assert found["result"]["rows"]["device"]["over_plain"]["median"] > 0
    assert "| verify-k5 | ok |" in (tmp_path / "summary.md").read_text(encoding="utf-8")
    before = (tmp_path / "verify-k5.json").stat().st_mtime_ns
    assert gpu_suite.main() == 0
    assert (tmp_path / "verify-k5.json").stat().st_mtime_ns == before
