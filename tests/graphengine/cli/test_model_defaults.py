"""`--model-defaults`: a checkpoint's own recommendation, and the flags that win over it."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from graphengine.cli.options import SamplingOptions
from graphengine.sampling.params import SamplingParams
from tests.graphengine.cli.conftest import SMALL, Cli
from tests.tiny import make_checkpoint

KEYS = {"do_sample": True, "temperature": 0.5, "top_k": 7, "max_new_tokens": 9}


@pytest.fixture(scope="module")
def recommending(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with `KEYS` in its generation_config.json."""
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("recommending"))
    (checkpoint / "generation_config.json").write_text(json.dumps(KEYS))
    return checkpoint


@pytest.mark.parametrize(
    ("flags", "max_tokens", "expected"),
    [
        ({}, None, {"temperature": 0.5, "top_k": 7, "max_tokens": 9}),
        ({"top_k": 0, "seed": 3}, 5, {"temperature": 0.5, "top_k": 0, "seed": 3, "max_tokens": 5}),
        ({"temperature": 0.0}, None, {"temperature": 0.0, "top_k": 7, "max_tokens": 9}),
    ],
)
def test_given_flags_win(
    recommending: Path, flags: dict[str, Any], max_tokens: int | None, expected: dict[str, Any]
) -> None:
    """Guards a flag's own default taken for something given, and 0 taken for not given."""
    model = str(recommending)
    options = SamplingOptions(model_defaults=True, **flags)
    assert options.params(model, max_tokens, 256) == SamplingParams(**expected)
    unasked = SamplingOptions(**flags).params(model, max_tokens, 256)
    assert unasked == SamplingParams(max_tokens=max_tokens or 256, **flags)


def test_a_checkpoint_without_any(checkpoint: Path) -> None:
    """Guards the command's own length of an answer, which the library's 16 must not replace."""
    options = SamplingOptions(model_defaults=True, top_p=0.5)
    assert options.params(str(checkpoint), None, 256) == SamplingParams(max_tokens=256, top_p=0.5)


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_the_flag_reaches_the_answer(
    cli: Cli, recommending: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a flag that is read and not used."""

    def run(*flags: str) -> tuple[str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
        result = cli(command, recommending, "--seed", "3", *flags, *SMALL)
        assert result.code == 0
        return result.out, result.err

    out, err = run("--model-defaults")
    assert "9 tokens (length)" in err
    same = run("--temperature", "0.5", "--top-k", "7", "--max-tokens", "9")
    assert out == same[0] != run("--max-tokens", "9")[0]
    assert "4 tokens (length)" in run("--model-defaults", "--max-tokens", "4")[1]


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_bad_value_is_one_line(cli: Cli, tmp_path: Path, command: str) -> None:
    """Guards a traceback, and a start of seconds before the refusal."""
    checkpoint = make_checkpoint(tmp_path / "bad")
    (checkpoint / "generation_config.json").write_text('{"max_new_tokens": 0}')
    prompt = ["hello"] if command == "generate" else []
    result = cli(command, checkpoint, *prompt, "--model-defaults", *SMALL)
    assert result.code == 2
    assert "generation_config.json: max_new_tokens=0" in result.err
    assert len(result.err.splitlines()) == 1
