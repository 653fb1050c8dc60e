"""The key of a remembered probe, and a cache folder that two dtypes share (case 15)."""

from __future__ import annotations

import ast
import inspect
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from graphengine import numerics
from graphengine.attention import cpu as attention_cpu
from graphengine.engine import Engine
from graphengine.models import native_ops, torch_ops
from graphengine.numerics import probe_key
from graphengine.sampling.params import SamplingParams
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Setup, scripted

SETUP = Setup(k=2, numerics="fast")  # nothing is probed but by hand


def key_of(engine: Engine, **changes: Any) -> str:
    """The key that this engine's start would use, or with other arguments."""
    sizes = engine.resolved.sizes
    arguments = {
        "row_counts": engine.runner.row_counts,
        "max_model_len": sizes.max_model_len,
        "opset": engine.runner.opset.name,
    }
    return probe_key(
        engine.runner.decoder, engine.runner.verifier_shape, **{**arguments, **changes}
    )


def test_what_the_probe_depends_on_is_in_its_key(checkpoints: Checkpoints) -> None:
    """A pass of one engine that another one takes for its own."""
    setups = [
        SETUP,
        replace(SETUP, dtype="bfloat16"),
        replace(SETUP, block_size=8),
        replace(SETUP, max_model_len=48),
        replace(SETUP, max_num_seqs=5),
        replace(SETUP, k=3),
        replace(SETUP, compile="off"),
    ]
    engines = [setup.start(checkpoints.get()) for setup in setups]
    engines += [SETUP.start(checkpoints.get(name)) for name in ("qwen3", "window")]
    keys = [key_of(engine) for engine in engines]
    assert len(set(keys)) == len(keys)
    assert key_of(SETUP.start(checkpoints.get())) == keys[0]
    for changes in ({"max_model_len": 63}, {"row_counts": [1, 2]}, {"opset": "inductor"}):
        assert key_of(engines[0], **changes) not in keys


def test_a_start_without_the_probe_says_so(
    checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    """A guarantee that is dropped in silence."""
    for mode in ("fast", "invariant"):
        caplog.clear()
        engine = replace(SETUP, numerics=mode).start(checkpoints.get())
        assert ("a stream may change" in caplog.text) == (mode == "fast")
        assert engine.capture_report().endswith(f"numerics {mode}")


@pytest.mark.parametrize("threads", [1, 3])
def test_the_number_of_threads_is_in_the_key(threads: int, checkpoints: Checkpoints) -> None:
    """Schedules that depend on the threads, passed with others."""
    engine, before = SETUP.start(checkpoints.get()), torch.get_num_threads()
    key = key_of(engine)
    torch.set_num_threads(before + threads)
    try:
        assert key_of(engine) != key
    finally:
        torch.set_num_threads(before)
    assert key_of(engine) == key


@pytest.mark.parametrize("module", [attention_cpu, native_ops, torch_ops, *numerics.PROBED])
def test_changed_code_is_probed_again(
    module: ModuleType, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that outlives the code that passed."""
    engine, source = SETUP.start(checkpoints.get()), inspect.getsource
    key = key_of(engine)
    monkeypatch.setattr(inspect, "getsource", lambda one: source(one) + "#" * (one is module))
    assert key_of(engine) != key


DTYPES = ("bfloat16", "float32", "bfloat16")


def answers(checkpoints: Checkpoints, setup: Setup) -> tuple[dict[tuple[str, int], bytes], bool]:
    """Logits of three requests with drafts, and whether the probe's pass was remembered."""
    engine = setup.start(checkpoints.get(), scripted("ragged", {}, seed=3))
    harness = Harness(engine, keep_logits=True)
    for index in range(3):
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        harness.add(str(index), [40 * index + i for i in range(3 + 5 * index)], params)
    harness.drain()
    logits = {place: row.tobytes() for place, row in harness.logits.items()}
    return logits, engine.start_times.cached["numerics"]


@pytest.mark.parametrize(
    "compile_mode", ["native", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_engines_of_two_dtypes_share_a_cache(
    compile_mode: Any, checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code or passes of one dtype, served to an engine of the other."""
    setup = Setup(k=2, compile=compile_mode)
    expected = {}
    for dtype in set(DTYPES):
        monkeypatch.setenv("GRAPHENGINE_CACHE_DIR", str(tmp_path / dtype))
        expected[dtype], _ = answers(checkpoints, replace(setup, dtype=dtype))
    assert expected["bfloat16"] != expected["float32"]
    monkeypatch.setenv("GRAPHENGINE_CACHE_DIR", str(tmp_path / "shared"))
    for dtype, seen in zip(DTYPES, (False, False, True), strict=True):
        logits, cached = answers(checkpoints, replace(setup, dtype=dtype))
        assert cached == seen
        assert logits == expected[dtype]


def test_modules_that_the_pieces_import_are_in_the_key() -> None:
    """A module that is split, and one half of which is forgotten."""
    probed = {module.__name__ for module in numerics.PROBED}
    home = "graphengine.sampling."
    for module in numerics.PROBED:
        tree = ast.parse(inspect.getsource(module))
        found = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        needed = {name for name in found if name.startswith(home)}
        # What a user may ask for; its numbers reach the pieces through sizes that are in the key.
        assert needed - {home + "params"} <= probed, module.__name__
