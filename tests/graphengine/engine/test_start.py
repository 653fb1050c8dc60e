"""Starting: what is compiled and imported, from which cache, and what laziness leaves for later."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch._inductor.utils import clear_caches

from capture.config import CaptureConfig
from graphengine.engine import Engine
from graphengine.kernels import library
from graphengine.sampling.params import SamplingParams
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.fixed_length import FixedLength
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Setup

ROOT = Path(__file__).parents[3]
SETUP = Setup(k=2, max_num_seqs=3, max_model_len=128)
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


# Parameters whose steps take cells of their own.
TIERS: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0, "seed": 1}, {"logprobs": 1})


def start_lazily(setup: Setup, checkpoint: Path, budget: int | None = None) -> Harness:
    config = setup.config()
    capture = replace(config.capture, lazy=True, memory_budget=budget)
    return Harness(Engine(checkpoint, replace(config, capture=capture), proposer=FixedLength()))


def visit_every_cell(harness: Harness) -> None:
    """Batches of every size with drafts of every length; each cell is used."""
    proposer = harness.engine.proposer
    assert isinstance(proposer, FixedLength)
    for tier, fields in enumerate(TIERS):
        params = SamplingParams(max_tokens=60, ignore_eos=True, **fields)
        for num_reqs in range(1, SETUP.max_num_seqs + 1):
            harness.add(f"{tier}-{num_reqs}", [num_reqs], params)
            for proposer.length in range(SETUP.k + 1):
                harness.step()
        harness.drain()
    replays = harness.engine.stats().replays
    assert {name for name, n in replays.items() if n} == {
        str(key) for key in harness.engine.resolved.table
    }


def test_a_lazy_engine_compiles_nothing_after_start(checkpoints: Checkpoints) -> None:
    """A piece that meets its first several rows in service, in the first larger cell (case 14)."""
    harness = start_lazily(replace(SETUP, compile="inductor"), checkpoints.get())
    started = harness.engine.stats()
    assert not started.capture_seconds
    visit_every_cell(harness)
    stats = harness.engine.stats()
    assert stats.compile_events_after_warmup == 0
    assert stats.compile_events == started.compile_events > 0
    assert len(stats.capture_seconds) == len(harness.engine.resolved.table)


def test_a_lazy_engine_over_its_budget_serves_the_same_tokens(checkpoints: Checkpoints) -> None:
    """A budget that is reached in the middle of serving must not end it (case 57)."""
    plain = start_lazily(SETUP, checkpoints.get())
    visit_every_cell(plain)
    need = plain.engine.runner.buffers.num_bytes
    one_cell = max(plain.engine.stats().capture_bytes.values())
    tight = start_lazily(SETUP, checkpoints.get(), budget=need + 2 * one_cell)
    visit_every_cell(tight)
    stats = tight.engine.stats()
    assert sum(stats.capture_bytes.values()) <= 2 * one_cell
    assert len(stats.capture_bytes) == len(stats.capture_seconds) == 2
    replays = sum(n for name, n in stats.replays.items() if name not in stats.capture_bytes)
    assert stats.eager_fallbacks["capture:memory_budget"] == replays > 0
    for name in plain.requests:
        assert tight.stream(name) == plain.stream(name)


SCRIPT = """
import sys
from graphengine import LLM, SamplingParams
with LLM(sys.argv[1], max_model_len=64, max_num_seqs=2, speculative="ngram:2") as llm:
    llm.generate([[1, 2, 1, 2, 1]], SamplingParams(max_tokens=6))
    assert llm.stats().compile_events == 0
print(*[name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules])
"""


def test_a_native_start_imports_no_compiler(checkpoints: Checkpoints) -> None:
    """Seconds of import, at every start, for a compiler that native does not need (case 58)."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(checkpoints.get())],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


@pytest.fixture(scope="module")
def warm_cache(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory that one finished start has filled."""
    cache = tmp_path_factory.mktemp("cache")
    library.load()  # the kernels of the user's cache serve the whole process
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAPHENGINE_CACHE_DIR", str(cache))
        clear_caches()  # what this process has loaded is not written again
        engine = replace(SETUP, compile="inductor").start(checkpoints.get())
        assert not any(event.cache_hit for event in engine.runner.compiler.events)
        assert engine.start_times.cached["capture"] is False
        engine.close()
    return cache


def cut(paths: list[Path]) -> None:
    assert paths, "nothing to damage"
    for path in paths:
        os.truncate(path, path.stat().st_size // 2)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "none": lambda cache: None,
    "binaries": lambda cache: cut(list((cache / "inductor").glob("*/*.so"))),
    "probe": lambda cache: cut(list((cache / "numerics").glob("*.json"))),
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_start_from_a_damaged_cache_rebuilds_it(
    damage: str,
    warm_cache: Path,
    checkpoints: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A damaged cache costs a rebuild, not the start, and no token; a sound one is used (58)."""
    cache = shutil.copytree(warm_cache, tmp_path / "cache")
    DAMAGE[damage](cache)
    monkeypatch.setenv("GRAPHENGINE_CACHE_DIR", str(cache))
    if damage == "none":
        clear_caches()  # so that what is on the disk is loaded
    with caplog.at_level(logging.WARNING):
        harness = Harness(replace(SETUP, compile="inductor").start(checkpoints.get()))
    events = harness.engine.runner.compiler.events
    assert events
    if damage in ("none", "probe"):
        assert all(event.cache_hit for event in events)
    else:
        assert "damaged or unfinished; rebuilding it" in caplog.text
        assert not any(event.cache_hit for event in events)
    assert ("is unreadable" in caplog.text) == (damage == "probe")
    times = harness.engine.start_times
    assert times.cached == {
        "kernels": True,  # of this process
        "numerics": damage != "probe",
        "capture": damage != "binaries",
    }
    assert times.warm == (damage == "none")
    assert bool(caplog.records) == (damage != "none")
    native = Harness(Setup().start(checkpoints.get()))
    for one in (harness, native):
        one.add("a", [7, 8, 7, 8, 7], PARAMS)
        one.drain()
    assert harness.stream("a") == native.stream("a"), "fp32 far from ties: both identities agree"
    assert harness.engine.stats().compile_events_after_warmup == 0


def test_a_budget_below_the_buffers_is_refused_before_weights(checkpoints: Checkpoints) -> None:
    """A lazy engine must not find out in service that not even its buffers fit."""
    config = replace(SETUP.config(), capture=CaptureConfig(lazy=True, memory_budget=1000))
    phases: list[str] = []
    with pytest.raises(ValueError, match=r"memory_budget=1000.*need"):
        Engine(checkpoints.get(), config, progress=lambda phase, *_: phases.append(phase))
    assert not phases
