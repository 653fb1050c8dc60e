"""`generate --trace`: the page of an answer, and what is refused before anything is loaded."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from graphengine.cli import trace
from graphengine.engine import Engine
from graphengine.outputs import RequestOutput
from tests.graphengine.cli.conftest import SMALL, Cli

TOKENS = ["--max-tokens", "24"]
PROMPT = "the way the way the way"


def _data(path: Path) -> dict[str, Any]:
    found = re.search(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"), re.S)
    assert found is not None
    data: dict[str, Any] = json.loads(found.group(1))
    return data


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--speculate", "ngram:3"],
        ["--speculate", "suffix:3", "--temperature", "1", "--seed", "7"],
        ["--speculate", "ngram:3", "--verification", "rejection"],
    ],
)
def test_the_answer_is_the_same_and_on_the_page(
    cli: Cli, checkpoint: Path, tmp_path: Path, flags: list[str]
) -> None:
    """Guards a page that shows another answer than the one that was given, or changes it."""
    file = tmp_path / "page.html"
    arguments = ("generate", checkpoint, PROMPT, *flags, *TOKENS, *SMALL)
    plain = cli(*arguments)
    traced = cli(*arguments, "--trace", file)
    assert (traced.code, traced.out) == (0, plain.out)
    assert f"wrote {file}" in traced.err
    data = _data(file)
    (answer,) = data["answers"]
    texts = [
        answer["texts"].get(str(index), data["vocab"][str(token_id)])
        for index, token_id in enumerate(answer["ids"])
    ]
    assert "".join(texts).removesuffix("\n") == plain.out.removesuffix("\n")
    assert PROMPT in answer["prompt"]
    assert data["about"]["speculative"] == bool(flags)
    assert len(answer["likely"]) == len(answer["ids"])


def test_the_command_line_has_no_private_path(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    """Guards a page that tells its reader where somebody keeps files."""
    prompt, file = tmp_path / "prompt.txt", tmp_path / "page.html"
    prompt.write_text("hello")
    result = cli(
        *("generate", checkpoint, "-f", prompt, "--no-stats", "--proposer", "ngram:2"),
        *(*TOKENS, *SMALL, "--trace", file),
    )
    assert result.code == 0
    page = file.read_text(encoding="utf-8")
    assert str(tmp_path) not in page
    assert str(checkpoint.parent) not in page
    command = _data(file)["about"]["command"]
    assert command.startswith(f"graphengine generate {checkpoint.name} --file prompt.txt ")
    for words in ("--no-stats", "--speculate ngram:2", "--max-tokens 24", "--trace page.html"):
        assert words in command
    assert "--temperature" not in command
    long = "a/b and " * 10
    assert cli("generate", checkpoint, long, *TOKENS, *SMALL, "--trace", file).code == 0
    assert f"'{long[:59]}…'" in _data(file)["about"]["command"]


@pytest.mark.parametrize(("place", "why"), [("", "is a folder"), ("none/page.html", "no folder")])
def test_a_bad_path_is_refused_before_the_start(
    cli: Cli, checkpoint: Path, tmp_path: Path, place: str, why: str
) -> None:
    """Guards an answer of minutes whose page cannot be written."""
    result = cli("generate", checkpoint, "hello", *SMALL, "--trace", tmp_path / place)
    assert result.code == 2
    assert why in result.err
    assert "loading" not in result.err


def test_a_file_that_may_not_be_written_is_refused(
    cli: Cli, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same where only the rights are missing; root has all, so they are denied here."""
    monkeypatch.setattr(trace.os, "access", lambda path, mode: path != tmp_path)
    result = cli("generate", checkpoint, "hello", *SMALL, "--trace", tmp_path / "page.html")
    assert result.code == 2
    assert "cannot be written" in result.err
    assert "loading" not in result.err


def test_ctrl_c_leaves_a_page_of_what_there_is(
    cli: Cli, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a page that is lost with an answer that took too long."""
    step, steps = Engine.step, [0]

    def interrupted_step(self: Engine) -> list[RequestOutput]:
        steps[0] += 1
        if steps[0] == 6:
            signal.raise_signal(signal.SIGINT)
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted_step)
    file = tmp_path / "page.html"
    result = cli("generate", checkpoint, PROMPT, *TOKENS, *SMALL, "--trace", file)
    assert result.code == 130
    (answer,) = _data(file)["answers"]
    assert answer["finish"] == "abort"
    assert 0 < len(answer["ids"]) < 24
