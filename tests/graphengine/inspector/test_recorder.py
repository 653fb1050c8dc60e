"""The recorder: what it keeps is what happened, and nothing changes because of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from graphengine import tracing
from graphengine.config import CacheConfig
from graphengine.inspector import Recorder
from graphengine.inspector.page_data import figures, origins
from graphengine.outputs import RequestOutput
from graphengine.sampled import Sampled
from graphengine.sampling.params import SamplingParams
from graphengine.speculative_config import SpeculativeConfig
from tests.graphengine.inspector.recorded import METHODS, PROMPT, WEIGHTS, Run, serve, start

Job = tuple[str, str, SamplingParams]

LONG_TOKENS = 60
LONG = SamplingParams(max_tokens=LONG_TOKENS, ignore_eos=True)
REQUESTS = [
    ("greedy", PROMPT, LONG),
    ("sampled", "import os\nimport ", replace(LONG, temperature=0.8, seed=3)),
    ("short", "x = [1, 2, 3, 1, 2, 3, 1, 2", SamplingParams(max_tokens=30)),
    ("several", "class ", replace(LONG, temperature=1.0, seed=5, n=2)),
    ("cut", PROMPT, SamplingParams(max_tokens=60, stop=["ead"])),
]


def _traced(requests: list[Job]) -> list[Job]:
    return [(name, prompt, replace(params, logprobs=5)) for name, prompt, params in requests]


@pytest.fixture(scope="module", params=list(METHODS))
def runs(request: pytest.FixtureRequest) -> Iterator[tuple[Run, Run]]:
    """The same requests without and with a recorder and the log-probabilities that it shows."""
    engine = start(request.param)
    plain = serve(engine, REQUESTS, record=False)
    traced = serve(engine, _traced(REQUESTS), record=True)
    yield plain, traced
    engine.close()


def test_recording_changes_no_token(runs: tuple[Run, Run]) -> None:
    """Guards the one promise: a page shows the run that would have been without it. (Under
    rejection the drafts must be the same, too, which a fixed length sees to.)"""
    plain, traced = runs
    assert traced.streams == plain.streams
    assert [one.text for out in traced.outputs.values() for one in out.outputs] == [
        one.text for out in plain.outputs.values() for one in out.outputs
    ]


def test_records_are_what_happened(runs: tuple[Run, Run]) -> None:
    """Guards against a draft, an origin or a step that is counted to another answer or step."""
    _, run = runs
    assert run.recorder is not None
    answers = run.recorder.answers()
    assert len(answers) == 6
    launched: dict[str, list[list[int]]] = {}
    for step in run.launched:
        for request_id, drafts in step.items():
            launched.setdefault(request_id, []).append(drafts)
    for answer in answers:
        request, visits = answer.request, answer.visits
        output = run.outputs[request.asked_id].outputs[request.choice]
        assert [token for visit in visits for token in visit.token_ids] == output.token_ids
        letters = "".join(map(origins, visits))
        names = {"a": "accepted", "r": "recovered", "b": "bonus", "p": "bonus"}
        assert [names[letter] for letter in letters] == output.token_origins
        assert [visit.draft_ids for visit in visits] == launched[request.request_id]
        for visit in visits:
            assert visit.token_ids[: visit.num_accepted] == visit.draft_ids[: visit.num_accepted]
            assert len(visit.logprobs) == len(visit.token_ids)
        found = [dict(one) for visit in visits for one in visit.logprobs]
        assert found == output.logprobs
        assert request.metrics.num_steps == len(visits)


def test_sums_are_the_engines_own(runs: tuple[Run, Run]) -> None:
    """Guards figures on the page that contradict `llm.stats()`."""
    _, run = runs
    assert run.recorder is not None
    stats, steps = run.stats, run.recorder.steps
    assert len(steps) == stats.num_steps
    assert sum(step.num_reqs for step in steps) == stats.num_request_steps
    found = [figures(answer.visits, steps) for answer in run.recorder.answers()]
    assert sum(one["tokens"] for one in found) == stats.num_emitted_tokens
    assert sum(one["drafted"] for one in found) == stats.num_draft_tokens
    assert sum(one["accepted"] for one in found) == stats.num_accepted_tokens
    for place, accepted in enumerate(stats.accepted_per_position):
        rows = [one["positions"][place] for one in found if place < len(one["positions"])]
        assert sum(row[1] for row in rows) == accepted
    cells: dict[str, int] = {}
    for step in steps:
        key = f"{step.batch}x{step.num_drafts + 1}:{step.tier}"
        cells[key] = cells.get(key, 0) + 1
        assert step.verify > 0
        assert min(step.draft, step.prefill, step.host) >= 0
    replays = {key: count for key, count in stats.replays.items() if ":draft" not in key}
    assert cells == replays


def test_probabilities_of_drawn_drafts() -> None:
    """Guards a probability of another row, place or token than the one that was drawn."""
    engine = start("rejection")
    run = serve(engine, _traced(REQUESTS), record=True)
    engine.close()
    assert run.recorder is not None
    drawn = 0
    for answer in run.recorder.answers():
        for visit in answer.visits:
            if visit.draft_probs is None:
                continue
            assert len(visit.draft_probs) == len(visit.draft_ids)
            assert all(0 < chance <= 1 for chance in visit.draft_probs)
            drawn += answer.request.params.temperature > 0
            if answer.request.params.temperature == 0:
                assert visit.draft_probs == [1.0] * len(visit.draft_ids)
    assert drawn > 10


def test_asynchronous_steps_have_the_same_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against reading a draft that stays on the device after the next has replaced it."""
    method = SpeculativeConfig(
        "draft_model", model=WEIGHTS / "draft_model", max_draft_tokens=3, adaptive=False
    )
    monkeypatch.setitem(METHODS, "async", method)
    found = []
    for async_steps in (0, 1):
        engine = start("async", async_steps=async_steps, max_num_seqs=1)
        run = serve(engine, [("one", PROMPT, replace(LONG, logprobs=1))], record=True)
        engine.close()
        assert run.recorder is not None
        (answer,) = run.recorder.answers()
        assert sum(visit.num_accepted for visit in answer.visits) > 10
        found.append({visit.start: (visit.draft_ids, visit.token_ids) for visit in answer.visits})
    sync, later = found
    both = [start for start in sync if start in later and sync[start][0] and later[start][0]]
    assert len(both) > 10
    for place in both:
        (some, tokens), (all_of, others) = later[place], sync[place]
        assert some == all_of[: len(some)]  # near the limit there is room for fewer
        assert len(some) == len(all_of) or place > LONG_TOKENS - 10
        assert tokens == others[: len(tokens)]


def _check_streams(run: Run) -> None:
    assert run.recorder is not None
    for answer in run.recorder.answers():
        output = run.outputs[answer.request.asked_id].outputs[answer.request.choice]
        assert [token for visit in answer.visits for token in visit.token_ids] == output.token_ids
        starts = [visit.start for visit in answer.visits]
        assert starts == sorted(set(starts))


def test_preempted_answers_are_whole() -> None:
    """Guards a record that is lost, or there twice, where a request has to start over."""
    engine = start("ngram", cache=CacheConfig(num_blocks=20))
    params = replace(LONG, logprobs=0)
    names = ("one", "two", "three", "four")
    run = serve(engine, [(name, PROMPT, params) for name in names], record=True)
    engine.close()
    assert len(run.outputs) == len(names)
    assert (
        run.outputs["four"].metrics.num_preemptions + run.outputs["three"].metrics.num_preemptions
    )
    _check_streams(run)


def test_a_step_that_breaks_off_is_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards tokens that stand twice on the page where Ctrl-C came between reading and commit."""
    engine = start("suffix", max_num_seqs=1)
    cut, calls = engine.delivery.cut, [0]

    def interrupted(sampled: Sequence[Sampled]) -> list[Sampled]:
        calls[0] += bool(sampled)
        if calls[0] == 4:
            calls[0] += 1
            raise KeyboardInterrupt
        return cut(sampled)

    monkeypatch.setattr(engine.delivery, "cut", interrupted)
    step = engine.step

    def patient() -> list[RequestOutput]:
        try:
            return step()
        except KeyboardInterrupt:
            return []

    monkeypatch.setattr(engine, "step", patient)
    run = serve(engine, [("one", PROMPT, LONG)], record=True)
    engine.close()
    assert calls[0] > 5
    assert len(run.outputs["one"].outputs[0].token_ids) == LONG_TOKENS
    _check_streams(run)


def test_an_engine_without_one_is_watched_by_nobody() -> None:
    """Guards a hook or a listener that stays behind."""
    engine = start("ngram", max_num_seqs=1)

    def fail_inside() -> None:
        with Recorder(engine):
            assert engine.flights.watch is not None
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_inside()
    assert engine.flights.watch is None
    assert tracing._listener is None
    with tracing.span(tracing.STEP) as inside:
        assert inside is None
    engine.close()
