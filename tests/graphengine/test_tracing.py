"""Named ranges: off they are not there, on they bracket the phases of a real step, errors too."""

import itertools
from pathlib import Path

import pytest
import torch

from graphengine import tracing
from graphengine.config import EngineConfig
from graphengine.engine import Engine
from graphengine.sampling.params import SamplingParams
from graphengine.speculative_config import SpeculativeConfig
from tests.tiny import make_checkpoint


def _ranges(profile: torch.profiler.profile) -> list[tuple[str, float, float]]:
    names = {tracing.STEP, *tracing.PHASES}
    found = [one for one in profile.events() or () if one.name in names]
    return [(one.name, one.time_range.start, one.time_range.end) for one in found]


def _profile() -> torch.profiler.profile:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


def test_a_step_has_every_phase_once_and_inside_it(tmp_path: Path) -> None:
    """Guards against a phase that a table then misses, or one that is counted to another."""
    config = EngineConfig(
        max_num_seqs=2, speculative=SpeculativeConfig("ngram", max_draft_tokens=1, adaptive=False)
    )
    engine = Engine(make_checkpoint(tmp_path / "tiny"), config)
    engine.add_request("one", [1, 2, 3, 1, 2], SamplingParams(max_tokens=8, ignore_eos=True))
    with _profile() as untraced:
        engine.step()
    assert not _ranges(untraced)
    engine.add_request("two", [4, 5, 6], SamplingParams(max_tokens=1))
    with tracing.enable(), _profile() as profile:
        engine.step()
    engine.step()  # off again
    engine.close()
    ranges = _ranges(profile)
    names = [name for name, _, _ in ranges]
    assert names.count(tracing.STEP) == 1
    bounds = {name: (start, end) for name, start, end in reversed(ranges)}  # the first of each
    first, last = bounds[tracing.STEP]
    assert all(first <= start <= end <= last for _, start, end in ranges)
    in_order = (tracing.SCHEDULE, tracing.PREFILL, tracing.DRAFT, tracing.VERIFY, tracing.COMMIT)
    for before, after in itertools.pairwise(in_order):
        assert bounds[before][1] <= bounds[after][0], f"{before} is not over when {after} begins"
    for outer, inner in ((tracing.VERIFY, tracing.PLAN), (tracing.COMMIT, tracing.EMIT)):
        begin, end = bounds[inner]
        assert bounds[outer][0] <= begin <= end <= bounds[outer][1], f"{inner} is not in {outer}"
    assert names.count(tracing.VERIFY) == 2  # launched, and read
    assert names.count(tracing.DRAFT) == 2  # drafting, and hearing what came of it
    assert set(names) == {tracing.STEP, *tracing.PHASES}


def test_an_error_ends_its_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against NVTX ranges that stay open and swallow all that comes later."""
    stack: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", stack.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", stack.pop)

    @tracing.traced(tracing.DRAFT)
    def fail(deep: int) -> None:
        assert stack == ["step", "draft", "draft"][: 2 + (deep == 0)]
        if deep:
            fail(deep - 1)
        raise RuntimeError("no")

    with tracing.enable(), pytest.raises(RuntimeError, match="no"), tracing.span(tracing.STEP):
        fail(1)
    assert stack == []
    with tracing.span(tracing.STEP):
        assert stack == [], "tracing was to end with its context"


def test_switching_inside_a_range_is_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a pop without its push, where a profiler is started inside a step."""
    stack: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", stack.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", stack.pop)
    with tracing.span(tracing.STEP):
        until = tracing.enable()
    assert stack == []
    with tracing.span(tracing.VERIFY):
        until.__exit__(None, None, None)
        assert stack == ["verify"]
    assert stack == []


def test_a_listener_is_told_of_each_range_until_its_end() -> None:
    """Guards times of the wrong range, and a listener that outlives its context."""
    heard: list[tuple[str, float, float]] = []
    with tracing.listen(lambda *range_: heard.append(range_)):
        with tracing.span(tracing.STEP), tracing.span(tracing.DRAFT):
            pass
        with tracing.enable(), tracing.span(tracing.VERIFY):
            pass  # a profiler beside it
        with tracing.span(tracing.PLAN):
            pass
    with tracing.span(tracing.COMMIT):
        pass
    assert [name for name, _, _ in heard] == ["draft", "step", "verify", "plan"]
    (_, first, last), (_, begin, end) = heard[:2]
    assert begin <= first <= last <= end
