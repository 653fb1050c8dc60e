"""What the wheel holds: the three packages with their native sources and data, and nothing else."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.repo import rules

_METADATA_FILES = ("pyproject.toml", "LICENSE", "README.md")


def _build(source: Path, out: Path) -> zipfile.ZipFile:
    """Builds a wheel from `source` without isolation, hence without a download."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (wheel,) = out.glob("*.whl")
    return zipfile.ZipFile(wheel)


@pytest.fixture(scope="module")
def sources(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, so that a stale build/ folder cannot put deleted files into the wheel."""
    copy = tmp_path_factory.mktemp("sources")
    for name in _METADATA_FILES:
        if (repo_root / name).exists():
            shutil.copy(repo_root / name, copy)
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "*.o")
    for name in (*rules.PACKAGES, "tests", "profiles"):
        shutil.copytree(repo_root / name, copy / name, ignore=ignore)
    return copy


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return _build(sources, tmp_path_factory.mktemp("dist"))


def _top(name: str) -> str:
    return name.split("/")[0]


def test_top_level_names(wheel: zipfile.ZipFile) -> None:
    """Guards against tests or profiles in a user's site-packages, and against a lost package."""
    tops = {_top(name) for name in wheel.namelist()}
    info = {top for top in tops if top.endswith(".dist-info")}
    assert len(info) == 1
    assert tops - info == set(rules.PACKAGES)


def test_every_source_file_is_in_the_wheel(wheel: zipfile.ZipFile, sources: Path) -> None:
    """Guards against a folder, kernel source or data file that works in a checkout only."""
    kept = {".py", ".cpp", ".h", ".json", ".html", ".css", ".js", ".typed"}
    wanted = {
        path.relative_to(sources).as_posix()
        for package in rules.PACKAGES
        for path in (sources / package).rglob("*")
        if path.is_file() and path.suffix in kept
    }
    missing = wanted - set(wheel.namelist())
    assert not missing, sorted(missing)


def test_typed_markers_kernels_and_prompts(wheel: zipfile.ZipFile) -> None:
    """Guards against sources being moved or lost, which the comparison above cannot see."""
    names = set(wheel.namelist())
    assert {f"{package}/py.typed" for package in rules.PACKAGES} <= names
    assert "graphengine/demo/prompts.json" in names
    assert {
        f"graphengine/inspector/{name}"
        for name in ("page.html", "page.css", "page.js", "charts.js")
    } <= names
    kernels = {Path(name).suffix for name in names if name.startswith("graphengine/kernels/")}
    assert {".cpp", ".h"} <= kernels


def test_metadata(wheel: zipfile.ZipFile, repo_root: Path) -> None:
    """Guards against a wheel without its command, its licence or (once there is one) its README."""
    (info,) = {_top(name) for name in wheel.namelist() if ".dist-info/" in name}
    entry_points = wheel.read(f"{info}/entry_points.txt").decode()
    assert "graphengine = graphengine.cli:main" in entry_points
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert any("licenses/LICENSE" in name for name in wheel.namelist())
    if (repo_root / "README.md").exists():
        assert "Description-Content-Type: text/markdown" in metadata, 'add readme = "README.md"'


def test_planted_stray_package_is_seen(sources: Path, tmp_path: Path) -> None:
    """Guards against an include-list so wide that the name check above could not fail."""
    copy = tmp_path / "copy"
    shutil.copytree(sources, copy)
    project = copy / "pyproject.toml"
    project.write_text(project.read_text().replace('"capture*"', '"capture*", "tests*"'))
    with _build(copy, tmp_path / "dist") as wheel:
        assert "tests" in {_top(name) for name in wheel.namelist()}
