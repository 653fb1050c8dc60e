"""`check-lossless` as a command: both checks, what they write, and that they can fail."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from graphengine.bench.laws import ON_SEEDS
from graphengine.sampling.verifier import greedy_verify
from tests.graphengine.cli.conftest import SMALL, Cli

PROMPT = "one two one two one two"
# A piece that a test may replace.
EAGER = ["--graph", "eager", "--compile", "off", "--numerics", "fast"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.json"
    entry = {"id": "p", "kind": "w", "chat": True, "text": PROMPT}
    path.write_text(json.dumps([entry, {**entry, "id": "q", "kind": "v", "chat": False}]))
    return path


@pytest.mark.parametrize("verification", ["exact", "rejection"])
def test_greedy_streams_are_identical_in_both_modes(
    cli: Cli, checkpoint: Path, prompts: Path, tmp_path: Path, verification: str
) -> None:
    """Guards a proof that leaves out what it was of: streams, drafts, machine, versions."""
    target = tmp_path / "out.json"
    result = cli(
        "check-lossless", checkpoint, "--prompts", prompts, "--prompt", PROMPT, "--k", 3,
        "--proposer", "ngram", "--verification", verification, "--max-tokens", 20,
        "--json", target, *SMALL,
    )  # fmt: skip
    assert result.code == 0, result.err
    assert result.out.splitlines()[-1] == "identical: 3 streams, 60 tokens"
    assert all(name in result.out for name in ("w", "v", "given", "drafted", "1 of 1"))
    data = json.loads(target.read_text())
    assert data["command"][0] == "graphengine"
    assert data["machine"]["cores"] >= 1
    assert data["versions"]["torch"]
    assert data["engine"]["speculative"]["verification"] == verification
    assert data["engine"]["draft_lengths"] == [0, 1, 2, 3]
    assert data["check"]["compared"] == "tokens"
    assert data["check"]["verdict"] == "identical: 3 streams, 60 tokens"
    assert data["check"]["holds"] is True
    assert data["flips"] == []
    assert [row["prompt"] for row in data["streams"]] == ["p", "q", "prompt-1"]
    for row in data["streams"]:
        assert row["off"]["token_ids"] == row["on"]["token_ids"]
        assert row["off"]["draft_tokens"] == 0 < row["on"]["draft_tokens"]


def test_sampled_streams_are_identical(
    cli: Cli, checkpoint: Path, prompts: Path, tmp_path: Path
) -> None:
    """Guards sampling parameters or seeds that do not reach the requests."""
    target = tmp_path / "out.json"
    result = cli(
        "check-lossless", checkpoint, "--prompts", prompts, "--temperature", 0.7, "--top-k", 5,
        "--samples", 3, "--seed", 11, "--max-tokens", 8, "--json", target, *SMALL,
    )  # fmt: skip
    assert result.code == 0, result.err
    assert "identical: 6 streams" in result.out
    data = json.loads(target.read_text())
    assert [row["seed"] for row in data["streams"]] == [11, 12, 13, 14, 15, 16]
    assert len({tuple(row["off"]["token_ids"]) for row in data["streams"]}) == 6
    assert (data["check"]["params"]["temperature"], data["check"]["params"]["top_k"]) == (0.7, 5)


def test_distributions_are_compared(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    """Guards a claim about distributions without the counts that it is made of."""
    target = tmp_path / "out.json"
    result = cli(
        "check-lossless", checkpoint, "--prompt", PROMPT, "--verification", "rejection",
        "--temperature", 0.5, "--top-k", 3, "--samples", 60, "--max-tokens", 3, "--json", target,
        "--max-num-seqs", 8, "--max-model-len", 128,
    )  # fmt: skip
    assert result.code == 0, result.err
    assert "no difference found (smallest p after Holm " in result.out.splitlines()[-1]
    data = json.loads(target.read_text())
    assert data["check"]["compared"] == "distributions"
    assert [row["positions"] for row in data["tests"]] == [[0], [1], [2], [0, 1], [1, 2]]
    for row in data["tests"]:
        for side in ("off", "on"):
            assert sum(count[side] for count in row["counts"]) == 60
    assert [len(data[side]) for side in ("off", "on")] == [60, 60]
    assert (data["off"][5]["seed"], data["on"][5]["seed"]) == (5, ON_SEEDS + 5)
    assert data["on"][0]["token_ids"]


def test_a_difference_of_distributions_is_exit_code_1(
    cli: Cli, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a difference that is printed and called success."""
    monkeypatch.setattr("graphengine.bench.laws.two_sample_p", lambda *_: 1e-9)
    result = cli(
        "check-lossless", checkpoint, "--prompt", PROMPT, "--verification", "rejection",
        "--temperature", 0.5, "--top-k", 3, "--samples", 30, "--max-tokens", 2,
        "--max-num-seqs", 8, "--max-model-len", 128,
    )  # fmt: skip
    assert result.code == 1
    assert "prompt-1, token 0: p 3e-09 after Holm, total variation" in result.out
    assert (
        "different (smallest p after Holm 3e-09, 3 tests of tokens 0 to 1 and"
        in result.err.splitlines()[-1]
    )


def accepts_one_wrong_draft(seen: dict[str, int]) -> Callable[..., None]:
    """A verifier that is right but for one draft, the first wrong one after three tokens."""

    def verify(
        packed: torch.Tensor,
        target_ids: torch.Tensor,
        token_ids: torch.Tensor,
        query_len: torch.Tensor,
        num_draft_tokens: torch.Tensor,
        *rest: Any,
    ) -> None:
        target, draft = int(target_ids[0]), int(token_ids[1])
        if num_draft_tokens[0] and target != draft and "draft" not in seen:
            seen["steps"] = seen.get("steps", 0) + 1
            if seen["steps"] == 3:
                seen.update(target=target, draft=draft)
                target_ids = target_ids.clone()
                target_ids[0] = draft
        greedy_verify(packed, target_ids, token_ids, query_len, num_draft_tokens, *rest)

    return verify


def test_one_wrong_draft_is_found(
    cli: Cli, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a check that cannot fail, or that points to the wrong place."""
    seen: dict[str, int] = {}
    target = tmp_path / "out.json"
    monkeypatch.setattr("graphengine.native_opset.greedy_verify", accepts_one_wrong_draft(seen))
    result = cli(
        "check-lossless", checkpoint, "--prompt", PROMPT, "--max-tokens", 24, "--json", target,
        *SMALL, *EAGER,
    )  # fmt: skip
    assert result.code == 1
    assert result.err.splitlines()[-1] == "different: 1 of 1 streams"
    data = json.loads(target.read_text())
    assert data["check"]["holds"] is False
    [flip], [row] = data["flips"], data["streams"]
    off, on = row["off"]["token_ids"], row["on"]["token_ids"]
    position = next(index for index, (a, b) in enumerate(zip(off, on, strict=False)) if a != b)
    assert position > 0
    assert (flip["position"], flip["off"], flip["on"]) == (position, seen["target"], seen["draft"])
    assert flip["likeliest"][0][0] == seen["target"]
    assert flip["top2_gap"] > 0
    assert f"token {position}" in result.out
    assert f"{seen['draft']} '" in result.out
    assert f"{flip['top2_gap']:.3g}" in result.out


def test_nothing_drafted_is_no_proof(cli: Cli, checkpoint: Path) -> None:
    """Guards off compared with off under the name of a proof."""
    result = cli("check-lossless", checkpoint, "--prompt", "ab", "--max-tokens", 1, *SMALL)
    assert result.code == 1
    assert "identical" not in result.out.splitlines()[-1]
    assert result.err.splitlines()[-1].startswith("nothing was drafted at all: both sides")


def test_a_prompt_that_does_not_fit_is_named(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    """Guards a traceback, or a message that does not say which of many prompts it is."""
    path = tmp_path / "prompts.json"
    entry = {"id": "long-one", "kind": "w", "chat": False, "text": "x" * 600}
    path.write_text(json.dumps([entry]))
    result = cli("check-lossless", checkpoint, "--prompts", path, *SMALL)
    assert result.code == 2
    assert "graphengine: error: request 'long-one (0.0)'" in result.err.splitlines()[-1]


def test_drafts_of_a_distribution(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    """Guards a check that can reach neither coupled drafts nor a residual of a real q."""
    target = tmp_path / "out.json"
    for sampling, verification in (("coupled", "exact"), ("probabilistic", "rejection")):
        result = cli(
            "check-lossless", checkpoint, "--prompt", PROMPT, "--proposer", "mock-drawn:2",
            "--draft-sampling", sampling, "--verification", verification, "--temperature", 1,
            "--top-k", 3, "--samples", 60, "--max-tokens", 3, "--json", target, *SMALL,
        )  # fmt: skip
        assert result.code == 0, result.err
        data = json.loads(target.read_text())
        assert data["engine"]["speculative"]["draft_sampling"] == sampling


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--option", "min_ngram_size"], "--option min_ngram_size: expected NAME=VALUE"),
        (["--option", "size=3"], "no option 'size'; its options are: "),
        (["--option", "min_ngram_size=x"], "min_ngram_size='x'"),
        (["--draft-sampling", "coupled"], "'ngram', which has no distribution: greedy"),
        (["--k", 0], "Invalid value for '--k'"),
    ],
)
def test_flags_of_drafting_are_checked(
    cli: Cli, checkpoint: Path, flags: list[Any], message: str
) -> None:
    """Guards a flag that is ignored, or an error that names Python and not the flag."""
    result = cli("check-lossless", checkpoint, "--proposer", "ngram", *flags, *SMALL)
    assert result.code == 2
    assert message in " ".join(result.err.split())
