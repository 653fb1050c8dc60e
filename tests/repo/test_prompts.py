"""The frozen prompt lists: unchanged since they were frozen, complete, and without repeats."""

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from graphengine.bench.workloads import load_workloads

_IDENTITY_KINDS = {"code": 20, "prose": 20, "chat": 20, "list": 20, "copy_edit": 20}
_BENCH_SIZES = {"copy_edit": 10, "code_continuation": 10, "story": 12, "chat": 10}


def _changed(root: Path, sums: str) -> list[str]:
    """Names in a SHA256SUMS text whose file below `root` has another hash."""
    pairs = [line.split("  ", 1) for line in sums.splitlines()]
    return [n for h, n in pairs if hashlib.sha256((root / n).read_bytes()).hexdigest() != h]


@pytest.fixture
def lists(repo_root: Path) -> dict[str, list[dict[str, Any]]]:
    bench = json.loads((repo_root / "profiles/prompts/bench.json").read_text("utf-8"))
    held_out = json.loads((repo_root / "profiles/prompts/acceptance.json").read_text("utf-8"))
    return {
        "held_out": held_out["chat"],
        "identity": json.loads((repo_root / "profiles/prompts/identity.json").read_text("utf-8")),
        "demo": json.loads((repo_root / "graphengine/demo/prompts.json").read_text("utf-8")),
        **bench,
    }


def test_lists_are_frozen(repo_root: Path) -> None:
    """Guards against prompts edited until they give a better number."""
    sums = (repo_root / "profiles/prompts/SHA256SUMS").read_text()
    assert len(sums.splitlines()) == 5
    assert not _changed(repo_root, sums)


def test_a_changed_file_is_found(tmp_path: Path) -> None:
    """Guards against a comparison that accepts any hash."""
    (tmp_path / "a.json").write_text("[]")
    good = hashlib.sha256(b"[]").hexdigest()
    assert _changed(tmp_path, f"{good}  a.json\n") == []
    (tmp_path / "a.json").write_text("[ ]")
    assert _changed(tmp_path, f"{good}  a.json\n") == ["a.json"]


def test_sizes(lists: dict[str, list[dict[str, Any]]]) -> None:
    """Guards against a lost prompt, after which a claim of "100 prompts" would be false."""
    assert Counter(entry["kind"] for entry in lists.pop("identity")) == _IDENTITY_KINDS
    assert len(lists.pop("demo")) == 4
    assert len(lists.pop("held_out")) == 24
    assert {kind: len(entries) for kind, entries in lists.items()} == _BENCH_SIZES
    assert all(entry["kind"] == kind for kind, entries in lists.items() for entry in entries)


def test_the_load_fills_the_largest_batch(repo_root: Path) -> None:
    """Guards against a batch of 16 in which some answers are the same."""
    load = load_workloads(repo_root / "profiles/prompts/load.json")
    assert {name: len(prompts) for name, prompts in load.items()} == dict.fromkeys(
        ("open", "random_ids", "random_ids_hot", "mixed"), 16
    )
    for prompts in load.values():
        assert len({(one.text, tuple(one.token_ids)) for one in prompts}) == 16
    assert {one.temperature for one in load["open"]} == {1.5}
    assert Counter(one.kind for one in load["mixed"]) == dict.fromkeys(
        ("copy_edit", "code_continuation", "chat", "open"), 4
    )


def test_entries(lists: dict[str, list[dict[str, Any]]]) -> None:
    """Guards against malformed or repeated prompts, which would weigh one text twice."""
    seen: set[str] = set()
    for entries in lists.values():
        assert len({entry["id"] for entry in entries}) == len(entries)
        for entry in entries:
            assert set(entry) == {"id", "kind", "chat", "text"}
            assert isinstance(entry["chat"], bool)
            assert entry["text"] == entry["text"].strip(), f"{entry['id']}: stray white space"
            assert entry["text"] not in seen, f"{entry['id']} repeats another prompt"
            seen.add(entry["text"])
