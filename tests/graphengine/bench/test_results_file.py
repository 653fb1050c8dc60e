"""Results files and what is written about the machine that made them."""

import json
import sys
from pathlib import Path

import pytest

from graphengine.bench.environment import command_line, without_folder
from graphengine.bench.results_file import check_target, write_json


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (".", "is a folder"),
        ("none/out.json", "the folder does not exist"),
        ("/dev/null", "not a regular file"),
        ("/proc/out.json", "cannot be written"),
    ],
)
def test_bad_targets_are_refused(tmp_path: Path, name: str, message: str) -> None:
    """Guards against minutes of measuring whose result cannot be kept, or a device replaced."""
    with pytest.raises(ValueError, match=message):
        check_target(tmp_path / name)


def test_the_check_leaves_the_last_result_alone(tmp_path: Path) -> None:
    """Guards against an earlier result that is lost when the new run fails."""
    file = tmp_path / "out.json"
    check_target(file)
    assert list(tmp_path.iterdir()) == []
    file.write_text("old")
    check_target(file)
    assert file.read_text() == "old"
    with pytest.raises(TypeError):
        write_json(file, {"not JSON": object()})
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_link_keeps_pointing_at_what_is_written(tmp_path: Path) -> None:
    """Guards against a link or a file's mode replaced along with the content."""
    file, link = tmp_path / "real.json", tmp_path / "link.json"
    file.write_text("{}")
    file.chmod(0o640)
    link.symlink_to(file)
    write_json(link, {"a": 1})
    assert link.is_symlink()
    assert json.loads(file.read_text()) == {"a": 1}
    assert file.stat().st_mode & 0o777 == 0o640


def test_results_do_not_tell_the_folders_of_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a committed command that names somebody's folders."""
    monkeypatch.chdir(tmp_path)
    inside, outside = tmp_path / "a" / "b.json", tmp_path.parent / "c.json"
    monkeypatch.setattr(sys, "argv", ["x", "bench", "--out", str(inside), f"--json={outside}"])
    assert command_line("p") == ["p", "bench", "--out", "a/b.json", "--json=c.json"]
    assert without_folder("ngram:6") == "ngram:6"
