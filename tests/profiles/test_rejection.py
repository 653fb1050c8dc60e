"""The rejection profile in small: a fair cell passes, a biased one does not, a cut run goes on."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from graphengine.config import EngineConfig
from graphengine.engine import Engine
from graphengine.sampling.params import SamplingParams
from profiles import rejection
from profiles.rejection import CELLS
from profiles.rejection_drafts import speculation
from profiles.target_law import Table, Target, count_stream, make_tables, run_tests
from profiles.tiny_model import VOCAB_SIZE, write_checkpoint

RELATED = next(n for n, c in enumerate(CELLS, 1) if c.drafts == "related" and c.temperature == 1)
OTHER_Q = next(n for n, c in enumerate(CELLS, 1) if c.drafts == "other-q")
TOKENS = 6000


def run(monkeypatch: pytest.MonkeyPatch, out: Path, cells: str, tokens: int = TOKENS) -> int:
    arguments = ["--out", out, "--cells", cells, "--tokens", tokens]
    monkeypatch.setattr(sys, "argv", ["rejection", *map(str, arguments)])
    return rejection.main()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """Exit code and report of a fair and of a biased cell, in one run."""
    out = tmp_path_factory.mktemp("rejection") / "both.json"
    with pytest.MonkeyPatch.context() as patch:
        return run(patch, out, f"{RELATED},{OTHER_Q}"), out


def test_a_fair_cell_passes_and_a_biased_one_is_caught(both: tuple[int, Path]) -> None:
    """Guards against tests that see nothing, or that see what is not there."""
    code, out = both
    report = json.loads(out.read_text())
    fair, biased = report["cells"]
    assert (code, report["summary"]["rejected_cells"], report["summary"]["missed_cells"]) == (
        0, [], [],
    )  # fmt: skip
    assert min(test["adjusted"] for test in biased["tests"]) < 1e-6
    assert fair["num_tokens"] == TOKENS
    assert report["summary"]["num_tests"] == len(fair["tests"])
    for row in (fair, biased):
        assert 0 < row["num_accepted_tokens"] < row["num_draft_tokens"]
        firsts = [one["tables"][0]["counts"] for one in row["prompts"]]
        assert sum(map(sum, firsts)) * CELLS[0].max_tokens == TOKENS


def test_a_cut_run_goes_on_where_it_stopped(
    both: tuple[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against requests that are counted twice, or never, after a run was cut off."""
    out, write = tmp_path / "cut.json", rejection.write_json

    def write_and_stop(*args: Any, **kwargs: Any) -> None:
        write(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(rejection, "write_json", write_and_stop)
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, out, str(RELATED))
    begun = json.loads(out.read_text())["cells"][0]
    assert begun["num_done"] == rejection.CHUNK < begun["num_requests"]
    monkeypatch.setattr(rejection, "write_json", write)
    assert run(monkeypatch, out, str(RELATED)) == 0
    whole = json.loads(both[1].read_text())["cells"][0]
    resumed = json.loads(out.read_text())["cells"][0]
    assert {**resumed, "seconds": 0} == {**whole, "seconds": 0}


def test_a_file_of_another_length_is_refused(
    both: tuple[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against cells of different sizes under one correction."""
    with pytest.raises(SystemExit, match="name another file"):
        run(monkeypatch, both[1], str(RELATED), TOKENS + 4)


def test_cells_are_drawn_from_seeds_of_their_own() -> None:
    """Guards against two cells that are one sample, and a proposer without every temperature."""
    assert len(set(CELLS)) == len(CELLS)
    for drafts in ("ngram", "greedy", "related", "same", "disjoint", "one-hot", "tiny"):
        tiny = [c for c in CELLS if (c.drafts, c.model, c.top_p) == (drafts, rejection.TINY, 1)]
        assert [cell.temperature for cell in tiny] == [0.5, 1.0, 1.7]
    assert sum(cell.biased for cell in CELLS) == 2
    assert any(cell.model == rejection.SMOLLM2 for cell in CELLS)


def test_a_seed_repeats_its_streams_where_the_same_drafts_come(tmp_path: Path) -> None:
    """Guards the page's word on seeds: batch mates change no stream, fewer drafts a step may."""
    model, cell = write_checkpoint(tmp_path), CELLS[RELATED - 1]
    target = Target(model, max_model_len=64)
    speculative = speculation(cell.drafts, target, cell.params(), model)
    streams = []
    for max_num_seqs, draft_limit in ((16, 3), (5, 3), (16, 1)):
        config = EngineConfig(max_model_len=64, max_num_seqs=max_num_seqs, speculative=speculative)
        engine = Engine(model, config)
        engine.draft_limit = draft_limit
        streams.append(rejection.serve(engine, cell, RELATED, rejection.PROMPTS, range(64)))
        engine.close()
    target.close()
    assert streams[0] == streams[1] != streams[2]


def test_tables_hold_the_law_of_likely_beginnings(tmp_path: Path) -> None:
    """Guards against beginnings chosen by what came, and probabilities that are no law."""
    target = Target(write_checkpoint(tmp_path), max_model_len=64)
    params = SamplingParams(max_tokens=3, temperature=1.0, top_p=0.9)
    prompt = rejection.PROMPTS[0]
    tables = make_tables(target, prompt, params, num_requests=5000)
    probs = target.probs(prompt, [], params)
    target.close()
    assert [len(table.beginning) for table in tables] == sorted(len(t.beginning) for t in tables)
    seconds = {table.beginning[0] for table in tables if len(table.beginning) == 1}
    assert seconds == {token for token in range(VOCAB_SIZE) if 5000 * probs[token] >= 400}
    assert max(len(table.beginning) for table in tables) == 2
    assert (probs == 0).any(), "top-p removes something"
    for table in tables:
        assert sum(table.probs) == pytest.approx(1, abs=1e-5)


def test_every_token_is_in_one_category() -> None:
    """Guards against counts that do not add up, and a token that cannot come and did."""
    tables = [
        Table(beginning=[], probability=1, ids=[7, 9], probs=[0.5, 0.3, 0.2]),
        Table(beginning=[9], probability=0.3, ids=[7], probs=[1.0, 0.0]),
    ]
    for stream in ([7, 7], [9, 7], [4, 4], [9, 7]):
        count_stream(tables, stream)
    assert [table.counts for table in tables] == [[1, 2, 1], [2, 0]]
    found = {test["test"]: test for test in run_tests(tables)}
    assert {name: test["num"] for name, test in found.items()} == {"first": 4, "first two": 4}
    assert found["first two"]["p"] > 0
    count_stream(tables, [9, 8])
    assert {test["test"]: test["p"] for test in run_tests(tables)}["first two"] == 0
