"""`bench` and `demo` as commands: output, JSON, exit code 1 where streams differ."""

import json
import re
from pathlib import Path

import pytest

from graphengine.bench.pairs import Difference
from graphengine.cli.bench import bench_config, parse_numbers
from graphengine.cli.options import EngineOptions
from tests.graphengine.cli.conftest import SMALL, Cli
from tests.tiny import make_checkpoint

DIFFERENCE = Difference(prompt_id="p", position=3, off=7, on=9)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.json"
    entry = {"id": "p", "kind": "w", "chat": True, "text": "one two one two one two"}
    path.write_text(json.dumps([entry, {**entry, "id": "q", "chat": False}]))
    return path


def test_bench_prints_and_writes_everything(
    cli: Cli, checkpoint: Path, prompts: Path, tmp_path: Path
) -> None:
    """Guards against a report that cannot be checked: raw pairs, machine and versions missing."""
    target = tmp_path / "out.json"
    result = cli(
        "bench", checkpoint, "--prompts", prompts, "--k", "1,2", "--rounds", 2, "--max-tokens", 8,
        "--replays", 2, "--json", target, *SMALL,
    )  # fmt: skip
    assert result.code == 0, result.err
    assert "4 of 4" in result.out
    data = json.loads(target.read_text())
    assert len(data["pairs"]) == 2 * 2 * 2
    assert all(pair["identical"] and pair["off"]["draft_tokens"] == 0 for pair in data["pairs"])
    assert [(row["k"], row["num_pairs"]) for row in data["summary"]] == [(1, 4), (2, 4)]
    assert {(step["k"], step["context"]) for step in data["steps"]} == {
        (k, context) for k in (0, 1, 2) for context in (100, 252)
    }
    assert data["machine"]["cores"] >= 1
    assert data["machine"]["threads"] >= 1
    assert data["versions"]["torch"]
    assert data["engine"]["draft_lengths"] == [0, 1, 2]
    assert data["command"][0] == "graphengine"


@pytest.mark.parametrize("command", ["bench", "demo"])
def test_a_difference_is_exit_code_1(
    cli: Cli, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a check that prints a difference and calls it success."""
    monkeypatch.setattr("graphengine.bench.pairs.first_difference", lambda *_: DIFFERENCE)
    replays = ["--replays", 0] if command == "bench" else []
    # The demo's prompts are long in tokens of one byte each.
    checkpoint = make_checkpoint(tmp_path / "long", max_position_embeddings=1024)
    size = ["--max-num-seqs", 1]
    options = ["--rounds", 1, "--max-tokens", 2, *replays, *size]
    result = cli(command, checkpoint, *options)
    assert result.code == 1
    assert "p: token 3 is 7 with speculation off and 9 with it on" in result.err


def test_bench_config_gives_every_length_a_cell() -> None:
    """Guards against a k that runs padded in a wider cell, and against prefix caching in pairs."""
    config, lengths = bench_config(EngineOptions().paired_config(), "4,2", 8)
    assert lengths == [2, 4]
    assert config.capture.draft_lengths == (0, 1, 2, 3, 4)
    assert config.speculative is not None
    assert config.speculative.max_draft_tokens == 4
    assert not config.cache.enable_prefix_caching
    asked = EngineOptions(speculate="ngram:5").paired_config()
    assert bench_config(asked, None, 1)[1] == ["adaptive"]
    config, choices = bench_config(asked, "adaptive, 7,3", 1)
    assert choices == [3, 7, "adaptive"]
    assert config.speculative is not None
    assert config.speculative.max_draft_tokens == 7
    fixed = EngineOptions(speculate="ngram:5", adaptive="off").paired_config()
    assert bench_config(fixed, None, 1)[1] == [5]
    with pytest.raises(ValueError, match="nothing adaptive"):
        bench_config(fixed, "2,adaptive", 1)
    with pytest.raises(ValueError, match=r"--k 'x': expected integers"):
        bench_config(asked, "adaptive,x", 1)


def test_what_is_compared_with_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against off compared with off, or with another proposer than the one asked for."""
    for value, expected in (("off", 6), ("ngram:3", 3)):
        monkeypatch.setenv("GRAPHENGINE_SPECULATE", value)
        config = EngineOptions().paired_config()
        assert config.speculative is not None
        assert (config.speculative.method, config.speculative.max_draft_tokens) == (
            "ngram",
            expected,
        )
    with pytest.raises(ValueError, match="--speculate off: this command compares"):
        EngineOptions(speculate="off").paired_config()


def test_the_peer_alone(cli: Cli, checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    """Guards against pairs that must be paid for to compare with a peer, and against batch sizes
    mixed in one ratio."""
    target = tmp_path / "out.json"
    result = cli(
        "bench", checkpoint, "--prompts", prompts, "--rounds", 0, "--replays", 0, "--batch", "1,2",
        "--against", "transformers", "--peer-rounds", 2, "--json", target, "--compile", "off",
        "--max-num-seqs", 2, "--max-model-len", 256, "--dtype", "float32",
    )  # fmt: skip
    assert result.code == 0, result.err
    assert "speculation on against off" not in result.out
    assert len(re.findall(r"^round \d, \w+, batch \d: .* tokens/s$", result.err, re.M)) == 14
    data = json.loads(target.read_text())
    assert data["pairs"] == data["steps"] == []
    turns = [(one["batch_size"], one["round"]) for one in data["turns"]]
    assert turns == [(1, 0)] * 4 + [(2, 0)] * 3 + [(1, 1)] * 4 + [(2, 1)] * 3
    assert [one["name"] for one in data["contenders"]] == ["graphengine"] * 2 + ["transformers"] * 2
    (row,) = (one for one in data["peer_summary"] if one["ratio"] and one["batch_size"] == 2)
    rates = [one for one in data["turns"] if one["batch_size"] == 2 and not one["k"]]
    ratios = sorted(
        ours["rate"] / theirs["rate"]
        for ours in rates
        for theirs in rates
        if (ours["contender"], theirs["contender"]) == ("graphengine", "transformers")
        and ours["round"] == theirs["round"]
    )
    assert [row["ratio"]["low"], row["ratio"]["high"]] == ratios


def test_number_lists() -> None:
    """Guards against "1,8" read as anything else."""
    assert parse_numbers("--k", " 8,1, 2,8", minimum=1) == [1, 2, 8]
    for bad in ("", "1,", "0", "-1", "1.5", "a"):
        with pytest.raises(ValueError, match="--k"):
            parse_numbers("--k", bad, minimum=1)


@pytest.mark.slow
def test_demo_on_the_demo_model(cli: Cli) -> None:
    """Guards against a first command of the README that fails or whose streams differ."""
    result = cli("demo", "--rounds", 1, "--max-tokens", 32, "--max-num-seqs", 1)
    assert result.code == 0, result.err
    assert "not one differs between off and on" in result.out
    assert "clockmaker" in result.out
    assert "\x1b" not in result.out
    for column in ("off", "on/off", "accepted", "tokens a step", "identical"):
        assert column in result.out
    assert "NO" not in result.out.split("identical")[1]
