"""Cache entries: keys that hold every fact, files that may be missing, broken or unwritable."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from capture import cache
from capture.cache import cache_dir, cache_key, machine_facts, read_entry, writable_dir, write_entry

FACTS: dict[str, Any] = {
    "max_draft_tokens": 3,
    "proposer": "ngram",
    "draft_hash": None,
    "hidden_size": 576,
    "dtype": "torch.bfloat16",
    "quantisation": None,
    "tensor_parallel": 1,
    "block_size": 16,
    "max_model_len": 2048,
    "tiers": ["greedy"],
    "threads": 2,
    "torch": "2.13.0",
}


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRAPHENGINE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("fact", "value"), [("max_draft_tokens", "3"), ("tensor_parallel", True), ("draft_hash", "")]
)
def test_values_of_other_types_are_other_keys(fact: str, value: object) -> None:
    """Guards keys made of printed values, where 3 and "3", 1 and True, None and "" are alike."""
    assert cache_key({**FACTS, fact: value}) != cache_key(FACTS)


def test_a_fact_is_kept_from_its_neighbours_and_order_is_nothing() -> None:
    """Guards case 15: a cache that hands one configuration the result of another."""
    for fact in FACTS:
        assert cache_key({k: v for k, v in FACTS.items() if k != fact}) != cache_key(FACTS)
    swapped = {**FACTS, "block_size": FACTS["max_model_len"], "max_model_len": FACTS["block_size"]}
    assert cache_key(swapped) != cache_key(FACTS)
    assert cache_key(dict(reversed(FACTS.items()))) == cache_key(FACTS)


def test_machine_facts_hold_what_numerics_depend_on() -> None:
    facts = machine_facts()
    assert set(facts) >= {"cpu", "capability", "threads", "torch", "python"}
    assert all(facts.values())
    assert cache_key(facts) == cache_key(machine_facts())


def test_an_entry_is_read_as_written(directory: Path) -> None:
    write_entry("probe", "k1", {"bits": [1, 2], "name": "é"})
    assert read_entry("probe", "k1") == {"bits": [1, 2], "name": "é"}
    assert cache_dir() == directory
    assert [path.name for path in (directory / "probe").iterdir()] == ["k1.json"]


def test_without_the_variable_the_cache_is_in_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAPHENGINE_CACHE_DIR")
    assert cache_dir() == Path.home() / ".cache" / "graphengine"


def test_a_missing_entry_is_none_and_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert read_entry("probe", "k1") is None
    assert not caplog.records


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"a": 1', b"\xff\xfe\x00", b"[1, 2]", b"null", b'"text"']
)
def test_a_broken_entry_is_a_miss_with_a_warning(
    directory: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    """Guards case 58: a damaged cache is rebuilt, it does not keep the engine from starting."""
    (directory / "probe").mkdir(parents=True)
    (directory / "probe" / "k1.json").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert read_entry("probe", "k1") is None
    assert "k1.json" in caplog.text
    write_entry("probe", "k1", {"rebuilt": 1})
    assert read_entry("probe", "k1") == {"rebuilt": 1}


def test_a_directory_in_the_place_of_an_entry_is_a_miss(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (directory / "probe" / "k1.json").mkdir(parents=True)
    assert read_entry("probe", "k1") is None
    write_entry("probe", "k1", {"a": 1})
    assert len(caplog.records) == 2
    assert [path.name for path in (directory / "probe").iterdir()] == ["k1.json"], (
        "a temporary file was left behind"
    )


def test_an_unwritable_directory_costs_the_cache_only(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards case 58. A file in the directory's place refuses even root."""
    directory.write_text("not a directory")
    write_entry("probe", "k1", {"a": 1})
    assert "cannot be written" in caplog.text
    assert read_entry("probe", "k1") is None
    assert directory.read_text() == "not a directory"


def test_a_failed_write_leaves_the_old_entry(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards atomicity: readers see the old entry or the new one, never half of one."""
    write_entry("probe", "k1", {"old": 1})
    half = json.dumps({"new": 1})[:3]
    write_text = Path.write_text

    def cut_short(self: Path, data: str, encoding: str | None = None) -> int:
        write_text(self, half, encoding=encoding)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", cut_short)
    write_entry("probe", "k1", {"new": 1})
    assert read_entry("probe", "k1") == {"old": 1}
    assert "No space left" in caplog.text
    assert [path.name for path in (cache_dir() / "probe").iterdir()] == ["k1.json"]


def test_writable_dir_falls_back_with_a_warning(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards case 58: compiled pieces need some directory, even where the configured one is not."""
    assert writable_dir(directory / "inductor") == directory / "inductor"
    assert not caplog.records
    (directory / "file").write_text("")
    fallback = writable_dir(directory / "file" / "inductor")
    try:
        assert fallback.is_dir()
        assert "is not writable" in caplog.text
        assert "GRAPHENGINE_CACHE_DIR" in caplog.text
    finally:
        fallback.rmdir()


def test_a_fallback_directory_goes_with_its_process(directory: Path) -> None:
    """Guards against a folder of compiled pieces that each start leaves behind."""
    directory.write_text("in the way")
    script = (
        "import os, sys, pathlib; from capture.cache import writable_dir\n"
        "made = writable_dir(pathlib.Path(sys.argv[1]) / 'kernels')\n"
        "(made / 'file').touch()\n"
        "if os.fork() == 0: sys.exit()\n"  # a child that ends first takes nothing away
        "os.wait(); assert (made / 'file').exists(); print(made)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(directory)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    made = Path(done.stdout.strip())
    assert made.name.startswith("graphengine-kernels-")
    assert not made.exists()


def test_the_cpu_name_needs_no_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> str:
        raise OSError("no /proc here")

    monkeypatch.setattr(cache.Path, "read_text", refuse)
    assert machine_facts()["cpu"]
