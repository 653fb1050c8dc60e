"""The cost table: timed at a cold start, remembered at a warm one, new where its key is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graphengine.cell_times import KIND
from graphengine.engine import Engine
from graphengine.sampling.params import SamplingParams
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.setups import Setup

SETUP = Setup(k=3, max_num_seqs=2)


@pytest.fixture(autouse=True)
def _own_cache(checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Setup().start(checkpoints.get()).close()  # the kernels are loaded
    monkeypatch.setenv("GRAPHENGINE_CACHE_DIR", str(tmp_path))


def start(checkpoints: Checkpoints, setup: Setup = SETUP, **options: Any) -> Engine:
    return setup.start(checkpoints.get(), **{"adaptive": True, **options})


def seconds(engine: Engine) -> dict[str, float]:
    return dict(engine.runner.manager.stats.replay_seconds)


def test_a_warm_start_remembers_every_cell(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """A start that times all cells again, or a controller that knows none."""
    cold, warm = start(checkpoints), start(checkpoints)
    assert set(seconds(cold)) == {str(key) for key in cold.resolved.table}
    assert all(value > 0 for value in seconds(cold).values())
    assert seconds(warm) == seconds(cold)  # to the last digit: not measured
    assert (cold.start_times.cached["timing"], warm.start_times.cached["timing"]) == (False, True)
    assert sum(cold.stats().replays.values()) == 0  # not counted as steps
    assert len(list((tmp_path / KIND).iterdir())) == 1


def test_another_engine_is_timed_anew(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Times of other sizes, of another graph, or of a file that is damaged."""
    start(checkpoints)
    for others in (Setup(k=2, max_num_seqs=2), Setup(k=3, max_num_seqs=2, graph="eager")):
        assert not start(checkpoints, others).start_times.cached["timing"]
    assert len(list((tmp_path / KIND).iterdir())) == 3
    for path in (tmp_path / KIND).iterdir():
        path.write_text('{"1x1:greedy": "fast", "1x2:greedy": -1}')
    again = start(checkpoints)
    assert not again.start_times.cached["timing"]
    assert set(seconds(again)) == {str(key) for key in again.resolved.table}


def test_a_fixed_length_times_nothing(checkpoints: Checkpoints) -> None:
    """A start that waits for numbers that nobody reads."""
    for adaptive in (False, "threshold", {1: 2}):
        engine = start(checkpoints, adaptive=adaptive)
        assert "timing" not in engine.start_times.seconds
        assert seconds(engine) == {}


def test_lazy_cells_are_timed_when_they_are_asked_for(checkpoints: Checkpoints) -> None:
    engine = start(checkpoints, Setup(k=3, max_num_seqs=2, lazy=True))
    assert seconds(engine) == {}
    engine.add_request("a", [1, 2, 1, 2, 1, 2], SamplingParams(max_tokens=12, ignore_eos=True))
    tokens = finish(engine)
    assert {name.split(":")[1] for name in seconds(engine)} == {"greedy"}
    eager = SETUP.start(checkpoints.get())
    eager.add_request("a", [1, 2, 1, 2, 1, 2], SamplingParams(max_tokens=12, ignore_eos=True))
    assert tokens == finish(eager)


def finish(engine: Engine) -> list[int]:
    """Tokens of the one request."""
    last = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            last = output
    assert last is not None
    return last.outputs[0].token_ids
