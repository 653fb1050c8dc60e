"""README's tour of the code: files that exist, in sizes that are about right."""

import re
import subprocess
from pathlib import Path

import pytest

ROW = re.compile(r"^\| (`[^|]+`) \| ([\d,]+) \|", re.MULTILINE)
SOURCES = (".py", ".cpp", ".h")


def rows(readme: str) -> list[tuple[list[str], int]]:
    """(paths, lines) of every row of the tables."""
    return [
        (re.findall(r"`([^`]+)`", paths), int(lines.replace(",", "")))
        for paths, lines in ROW.findall(readme)
    ]


def count_lines(root: Path, path: str) -> int:
    """Lines of a file, or of all tracked sources in a folder."""
    if not path.endswith("/"):
        return len((root / path).read_text(encoding="utf-8").splitlines())
    listed = subprocess.run(
        ["git", "ls-files", "--", path], cwd=root, capture_output=True, text=True, check=True
    )
    return sum(count_lines(root, name) for name in listed.stdout.split() if name.endswith(SOURCES))


def wrong(root: Path, readme: str) -> list[str]:
    """Rows that name what is not there, or whose number is off by more than a fifth."""
    found = []
    for paths, stated in rows(readme):
        missing = [path for path in paths if not (root / path).exists()]
        actual = 0 if missing else sum(count_lines(root, path) for path in paths)
        if missing or abs(actual - stated) > max(20, actual / 5):
            found.append(f"{', '.join(paths)}: {stated} lines, counted {actual}, missing {missing}")
    return found


def test_the_tour_matches_the_code(repo_root: Path) -> None:
    """Guards against a reader who is sent to a file that moved, or doubled."""
    readme = (repo_root / "README.md").read_text(encoding="utf-8")
    assert len(rows(readme)) > 12
    assert not wrong(repo_root, readme)


@pytest.mark.parametrize(
    "row",
    ["| `engine.py`, `gone.py` | 10 | x |", "| `engine.py` | 90 | x |", "| `a/` | 1,000 | x |"],
)
def test_planted_rows_are_found(row: str, tmp_path: Path) -> None:
    """Guards the check above."""
    (tmp_path / "engine.py").write_text("x = 1\n" * 10)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    assert not wrong(tmp_path, "| `engine.py` | 10 | x |")
    assert wrong(tmp_path, row)
