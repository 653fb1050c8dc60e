"""The start report: phases that add up to the whole, and whether caches served (case 58)."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from graphengine import startup
from graphengine.startup import StartTimes, start
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.setups import Setup

PHASES = ["headers", "tokenizer", "kernels", "weights", "buffers", "numerics", "capture"]


@pytest.mark.parametrize("numerics", ["invariant", "fast"])
def test_phases_add_up_to_the_whole(
    numerics: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds that are in no phase, or in two: a report that hides what a start waits for."""
    clock = count(100)  # a second passes at each look
    monkeypatch.setattr(startup, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    config = Setup(numerics=numerics).config()  # type: ignore[arg-type]
    times = start(checkpoints.get(), config).times
    assert list(times.seconds) == [p for p in PHASES if p != "numerics" or numerics == "invariant"]
    assert sum(times.seconds.values()) == next(clock) - 1 - 100
    assert f"total {len(times.seconds)}.00 s" in str(times)


def test_a_warm_start_says_so(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report from which nobody can tell whether the caches work."""
    Setup().start(checkpoints.get()).close()  # the kernels are loaded
    monkeypatch.setenv("GRAPHENGINE_CACHE_DIR", str(tmp_path))
    cold, warm = (Setup().start(checkpoints.get()).start_times for _ in range(2))
    assert cold.cached == {"kernels": True, "numerics": False}
    assert warm.cached == {"kernels": True, "numerics": True}
    assert (cold.warm, warm.warm) == (False, True)
    assert str(cold).endswith(", a cold start")
    assert str(warm).endswith(", a warm start")


def test_a_report_names_what_was_cached() -> None:
    """A note beside another phase than its own."""
    times = StartTimes(seconds={"headers": 0.5, "kernels": 2.0, "numerics": 1.0})
    times.cached.update(kernels=True, numerics=False)
    assert str(times) == (
        "headers 0.50 s, kernels 2.00 s (cached), numerics 1.00 s (not cached), total 3.50 s, "
        "a cold start"
    )
