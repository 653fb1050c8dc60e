"""The shell scripts around Nsight: they parse, refuse without the tool, and pass what they must.

The tools themselves are not on machines without a GPU; a stand-in on PATH writes down its arguments
and leaves the file that the real one would.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from profiles import ncu_table
from tests.profiles import nsys_export
from tests.profiles.test_ncu_table import COPY, report

FOLDER = Path(ncu_table.__file__).parent
NEEDED = ("bash", "sed", "dirname", "realpath", "cp")


def _run(script: str, tools: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(tools), "PYTHON": sys.executable, "PYTHONPATH": str(FOLDER.parent)}
    return subprocess.run(
        [shutil.which("bash") or "bash", str(FOLDER / script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder with what the scripts need of a system, and nothing else."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in NEEDED:
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    return folder


def _stand_in(tools: Path, name: str, lines: str) -> Path:
    """A tool that writes its arguments, one a line, then runs `lines`."""
    log = tools / f"{name}.log"
    tool = tools / name
    tool.write_text(f'#!/usr/bin/env bash\nprintf "%s\\n" "$@" >> {log}\n{lines}\n')
    tool.chmod(0o755)
    (tools / "env").symlink_to(shutil.which("env") or "env")
    return log


@pytest.mark.parametrize("script", ["nsys.sh", "ncu.sh"])
def test_scripts_parse_and_explain_themselves(script: str, tools: Path) -> None:
    """Guards against a typo that only a machine with a GPU would find."""
    assert os.access(FOLDER / script, os.X_OK)
    subprocess.run(["bash", "-n", str(FOLDER / script)], check=True)
    done = _run(script, tools)
    assert done.returncode == 2
    assert f"profiles/{script} OUT" in done.stderr


@pytest.mark.parametrize(("script", "tool"), [("nsys.sh", "nsys"), ("ncu.sh", "ncu")])
def test_a_missing_tool_is_named(script: str, tool: str, tools: Path, tmp_path: Path) -> None:
    """Guards against `command not found` from the middle of a script."""
    done = _run(script, tools, str(tmp_path / "out"), "profiles.marked_steps")
    assert done.returncode == 3
    assert f"{tool} is not on PATH: install Nsight" in done.stderr


def test_nsys_is_told_what_to_record(tools: Path, tmp_path: Path) -> None:
    """Guards against a report that begins with the loading, or a table of another file."""
    export = nsys_export.write(tmp_path / "made.sqlite", nsys_export.two_steps())
    out = tmp_path / "out"
    fake = f"[[ $1 == export ]] && cp {export} {out}.sqlite || : > {out}.nsys-rep"
    log = _stand_in(tools, "nsys", fake)
    done = _run("nsys.sh", tools, str(out), "profiles.marked_steps", "--k", "5")
    assert done.returncode == 0, done.stderr
    said = log.read_text().splitlines()
    assert {"--capture-range=cudaProfilerApi", "--capture-range-end=stop"} <= set(said)
    assert "--trace=cuda,nvtx,osrt" in said
    assert said[said.index("-m") :][:4] == ["-m", "profiles.marked_steps", "--k", "5"]
    assert "--type=sqlite" in said
    assert "| verify | 1 | 1 |" in done.stdout
    assert (tmp_path / "out.json").is_file()


def test_nsys_without_a_report_is_an_error(tools: Path, tmp_path: Path) -> None:
    """Guards against a module without marks, of which nsys leaves no report and says so only."""
    _stand_in(tools, "nsys", "exit 0")
    done = _run("nsys.sh", tools, str(tmp_path / "out"), "profiles.startup")
    assert done.returncode == 4
    assert "profiles.startup has not called torch.cuda.profiler.start" in done.stderr


def test_ncu_is_told_what_to_count(tools: Path, tmp_path: Path) -> None:
    """Guards against a run that locks the clocks, or whose metrics the table does not know."""
    made, out = tmp_path / "made.csv", tmp_path / "out"
    made.write_text(report(COPY))
    log = _stand_in(tools, "ncu", f"cp {made} {out}.csv")
    done = _run("ncu.sh", tools, str(out), "--batch", "2")
    assert done.returncode == 0, done.stderr
    said = log.read_text().splitlines()
    assert said[said.index("--clock-control") + 1] == "none"
    assert said[said.index("--profile-from-start") + 1] == "off"
    assert set(said[said.index("--metrics") + 1].split(",")) == {ncu_table.BYTES, ncu_table.TIME}
    assert said[-3:] == ["--ceiling", "--batch", "2"]
    assert "| copy_ceiling | 1 | 1.0 |" in done.stdout


def test_steps_are_marked_on_cuda_alone(tools: Path) -> None:
    """Guards against a profile of the CPU's steps that would be read as the GPU's."""
    done = subprocess.run(
        [sys.executable, "-m", "profiles.marked_steps", "--device", "cpu"],
        cwd=FOLDER.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "--device cpu is no CUDA device here" in done.stderr
