"""The start-up report: worst cases, and a real start of a tiny model in a process of its own."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from profiles import startup
from tests.tiny import make_checkpoint


def _start(kind: str, seconds: float, peak: int) -> dict[str, Any]:
    peaks = {"ready": peak // 2, "served": peak}
    return {
        "start": kind, "ready_seconds": seconds, "peak_bytes": peaks,
        "weight_bytes": 100, "kv_bytes": 50,
    }  # fmt: skip


def test_limits_hold_for_the_worst_start() -> None:
    """Guards against a median that hides a start over its limit, and a peak taken too early."""
    cold, warm = _start("cold", 80.0, 500), _start("warm", 10.0, 400)
    found = startup.summarise([cold, warm, _start("warm", 12.0, 900)])
    assert found["within_limits"]
    assert (found["cold_seconds"], found["warm_seconds_median"]) == (80.0, 11.0)
    assert found["bytes_beyond_weights_and_kv"] == 750
    for bad in (_start("cold", 91.0, 1), _start("warm", 21.0, 1), _start("warm", 1.0, 2 << 30)):
        assert not startup.summarise([cold, warm, bad])["within_limits"]


@pytest.mark.slow
def test_a_start_is_measured_from_before_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against seconds without the imports, and caches outside the folder of the run."""
    checkpoint, out = make_checkpoint(tmp_path / "tiny"), tmp_path / "out.json"
    options = ["--model", checkpoint, "--dtype", "float32", "--max-num-seqs", "2"]
    arguments = [*options, "--speculate", "ngram:1", "--rounds", "1", "--out", out]
    monkeypatch.setattr(sys, "argv", ["startup", *map(str, arguments)])
    # This process's clock is an hour late, so that what counts from its beginning tells.
    late = SimpleNamespace(monotonic=lambda: time.monotonic() - 3600)
    monkeypatch.setattr(startup, "time", late)
    monkeypatch.setattr(startup, "COLD_LIMIT", 7200)
    monkeypatch.setattr(startup, "WARM_LIMIT", 7200)
    assert startup.main() == 0
    data = json.loads(out.read_text())
    cold, warm = data["starts"]
    assert [cold["start"], warm["start"]] == ["cold", "warm"]
    for one in (cold, warm):
        phases = one["imports_seconds"] + sum(one["phase_seconds"].values())
        assert 3600 < phases <= one["ready_seconds"]
        assert one["first_batch_seconds"] < 3600
        assert one["first_batch_tokens"] > 0
        assert startup.beyond(one) > 0
    assert cold["phases_cached"] == dict.fromkeys(("kernels", "numerics", "timing"), False)
    assert warm["phases_cached"] == dict.fromkeys(("kernels", "numerics", "timing"), True)
    lines = capsys.readouterr().out.splitlines()
    assert len({line.count("|") for line in lines[:-1]}) == 1
