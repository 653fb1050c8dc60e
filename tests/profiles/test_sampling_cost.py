"""The cost of sampling: ratios within a turn, and each kind's step in the tier that it asks for."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from graphengine.resolve import GREEDY, LOGPROBS, SAMPLED
from profiles import sampling_cost
from tests.tiny import make_checkpoint


def test_ratios_are_of_one_turn_and_limits_hold_for_their_kind() -> None:
    """Guards a ratio of two medians, which drift moves, and a kind held to another's limit."""
    greedy = [1.0, 2.0, 4.0]
    seconds = {
        "greedy": greedy,
        "sampled, neutral": [1.1 * one for one in greedy],
        "everything on": [1.5 * one for one in reversed(greedy)],
    }
    first, neutral, everything = sampling_cost.summarise(seconds, 8)
    assert first["ratio"]["median"] == 1.0
    assert (first["limit"], first["within_limit"]) == (None, None)
    assert neutral["ratio"]["low"] == pytest.approx(1.1)
    assert neutral["ratio"]["high"] == pytest.approx(1.1)
    assert neutral["within_limit"]
    assert [everything["ratio"][name] for name in ("low", "median", "high")] == [0.375, 1.5, 6.0]
    assert not everything["within_limit"]


def test_a_run_times_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards greedy steps sold as sampled ones, drafts other than the text's, a request too few.

    Where everything is greedy, and where contexts differ, each ratio would be a good one.
    """
    checkpoint, out = make_checkpoint(tmp_path / "tiny"), tmp_path / "out.json"
    arguments = ["--model", checkpoint, "--batch", "1,2", "--turns", "3", "--out", out]
    monkeypatch.setattr(sys, "argv", ["sampling_cost", *map(str, arguments)])
    steps: list[tuple[list[Any], list[list[int]]]] = []
    replays: dict[str, int] = {}
    open_engine = sampling_cost.open_engine

    def spied(*given: Any) -> Any:
        engine = open_engine(*given)
        verify, close = engine.runner.verify, engine.close

        def spy(requests: Any, draft: Any) -> Any:
            steps.append((list(requests), draft.token_ids.tolist()))
            return verify(requests, draft)

        def count_and_close() -> None:
            replays.update((cell, count) for cell, count in engine.stats().replays.items() if count)
            close()

        monkeypatch.setattr(engine.runner, "verify", spy)
        monkeypatch.setattr(engine, "close", count_and_close)
        return engine

    monkeypatch.setattr(sampling_cost, "open_engine", spied)
    code = sampling_cost.main()
    expected = {GREEDY: 4, SAMPLED: 8, LOGPROBS: 4}  # with the warm-up; two kinds are sampled
    assert replays == {
        f"{batch}x4:{tier}": count for batch in (1, 2) for tier, count in expected.items()
    }
    for requests, drafts in steps:
        assert [request.num_tokens for request in requests] == [100] * len(requests)
        assert len({tuple(request.token_ids) for request in requests}) == len(requests)
        assert all(len(row) == 3 and len(set(row)) > 1 for row in drafts)
    data = json.loads(out.read_text())
    assert code == (0 if all(row["within_limit"] in (None, True) for row in data["steps"]) else 1)
    assert [row["batch_size"] for row in data["steps"]] == [1] * 4 + [2] * 4
    assert all(len(values) == 3 for turn in data["turns"] for values in turn["seconds"].values())
    assert len({text.count("|") for text in capsys.readouterr().out.splitlines()}) == 1


def test_too_few_texts_are_refused(tmp_path: Path) -> None:
    """Guards a batch of the same text several times, whose figures would be one request's."""
    engine = sampling_cost.open_engine(str(make_checkpoint(tmp_path / "tiny")), [1], 1)
    with pytest.raises(ValueError, match=r"bench\.json has .* not 1000"):
        sampling_cost.texts(engine, 1000, 20)
    engine.close()
