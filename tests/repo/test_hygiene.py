"""What must not be in the tree: machine paths, package hosts, unfinished work, blind excepts."""

import subprocess
from pathlib import Path

import pytest

from tests.repo import rules
from tests.repo.conftest import Plant


def test_tree_is_clean(repo_root: Path) -> None:
    """Guards against files that work on one machine only, or that nobody can clone quickly."""
    found = rules.hygiene(repo_root)
    assert not found, rules.report(found)


def test_no_blind_except(repo_root: Path) -> None:
    """Guards against a handler that turns a bug into a wrong answer."""
    found = rules.blind_except(repo_root)
    assert not found, rules.report(found)


@pytest.mark.parametrize(
    "line",
    [
        *(f"see {path}data/x.txt" for path in rules.MACHINE_PATHS),
        *(f"pip install {host}" for host in rules.PACKAGE_HOSTS),
        "# TO" + "DO later",
        "# FIX" + "ME",
    ],
)
@pytest.mark.parametrize("name", ["docs/a.md", "capture/a.py", "Makefile", "graphengine/a.cpp"])
def test_planted_text_is_found(plant: Plant, name: str, line: str) -> None:
    """Guards against a text rule that no longer fires or that skips a kind of file."""
    found = rules.hygiene(plant({name: f"fine\n{line}\n"}))
    assert [(v.path, v.line) for v in found] == [(name, 2)], rules.report(found)


def test_planted_big_file_is_found(plant: Plant) -> None:
    """Guards against weights or profiles being committed."""
    root = plant({"small.bin": "\0", "big.bin": "\0" * (rules.MAX_TRACKED_BYTES + 1)})
    assert [v.path for v in rules.hygiene(root)] == ["big.bin"]


def test_planted_weights_over_the_total_are_found(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a checkout that grows with every head that somebody trains."""
    monkeypatch.setattr(rules, "MAX_WEIGHTS_BYTES", rules.MAX_TRACKED_BYTES + 10)
    root = plant({"a.safetensors": "\0" * (rules.MAX_TRACKED_BYTES + 1)})
    assert not rules.hygiene(root)
    (root / "b.safetensors").write_bytes(b"\0" * 10)
    assert [v.path for v in rules.hygiene(root)] == ["b.safetensors"]


def test_ignored_files_do_not_count(plant: Plant) -> None:
    """Guards against an environment or build failing the check, and new files escaping it."""
    bad = "# TO" + "DO\n"
    root = plant({".gitignore": ".venv/\n", ".venv/a.py": bad, "new.py": bad})
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    assert [v.path for v in rules.hygiene(root)] == ["new.py"]


@pytest.mark.parametrize(
    "handler",
    [
        "except Exception:",
        "except:",
        "except BaseException as e:",
        "except (ValueError, Exception):",
    ],
)
@pytest.mark.parametrize("top", [*rules.BUDGETED, "tests"])
def test_planted_blind_except_is_found(plant: Plant, top: str, handler: str) -> None:
    """Guards against a blind-except rule that misses a spelling or a folder."""
    source = f"try:\n    x = 1\n{handler}\n    x = 2\n"
    assert rules.blind_except(plant({f"{top}/a.py": source}))


@pytest.mark.parametrize(
    "source",
    [
        "try:\n    x = 1\nexcept (ValueError, OSError):\n    x = 2\n",
        "try:\n    x = 1\nexcept BaseException:\n    close()\n    raise\n",
    ],
)
def test_named_or_reraised_errors_are_not_reported(plant: Plant, source: str) -> None:
    """Guards against forbidding clean-up that passes the error on."""
    assert not rules.blind_except(plant({"capture/a.py": source}))
