"""What a user sees of an error: one line on stderr and exit code 2; 130 for Ctrl-C."""

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import graphengine
from graphengine import cli as entry
from graphengine.cli.app import run
from graphengine.cli.console import show_anything
from tests.graphengine.cli.conftest import SMALL, Cli

MISSING = "/nonexistent/path"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "No such command 'nope'"),
        (["generate", "--bogus"], "No such option"),
        (["generate", "--max-tokens", "x"], "--max-tokens"),
        (["generate", "MODEL", "hi", "--max-tokens", "0"], "max_tokens=0"),
        (["generate", MISSING, "hi"], "does not exist"),
        (["generate", "MODEL", "hi", "--file", "f"], "given twice"),
        (["generate", "MODEL", "--file", MISSING], "cannot be read"),
        (["generate", "MODEL", " "], "the prompt is empty"),
        (["generate", "MODEL", "a\udcff"], "the prompt is not valid Unicode"),
        (["generate", "MODEL", "--file", "/proc"], "Is a directory"),
        (["generate", "MODEL", "--file", sys.executable], "not UTF-8 text"),
        (["generate", sys.executable, "hi"], "is a file but not a .gguf"),
        (["chat", "MODEL", "--system", "a\udcff"], "--system is not valid Unicode"),
        (["chat", "MODEL", "--max-tokens", "0"], "max_tokens=0"),
        (["capture-plan", "MODEL", "--capture-config", sys.executable], "not valid TOML"),
        (["generate", "MODEL", "hi", "--dtype", "int3"], "dtype='int3': allowed are auto"),
        (
            ["generate", "MODEL", "hi", "--speculate", "nope"],
            "speculative='nope': unknown proposer 'nope'",
        ),
        (["generate", "MODEL", "hi", "--speculate", "ngram:x"], "expected off, NAME or NAME:K"),
        (["generate", "MODEL", "hi", "--speculate", "ngram:99"], "max_draft_tokens=99"),
        (["generate", "MODEL", "hi", "--graph", "disk"], "graph='disk'"),
        (["generate", "MODEL", "hi", "--compile", "maybe"], "compile='maybe'"),
        (["generate", "MODEL", "hi", "--numerics", "loose"], "numerics='loose'"),
        (["generate", "MODEL", "hi", "--capture-config", MISSING], "cannot be read"),
        (["generate", "MODEL", "hi", "--block-size", "0"], "block_size=0"),
        (["generate", "MODEL", "hi", "--max-model-len", "4096"], "max_position_embeddings=512"),
        (["capture-plan", MISSING], "does not exist"),
        (["capture-plan", "MODEL", "--graph", "cuda"], "graph='cuda'"),
        (["capture-plan", "MODEL", "--kv-bytes", "9"], "max_bytes=9"),
        (["bench", "MODEL", "--batch", "1,a"], "--batch '1,a'"),
        (["bench", "MODEL", "--batch", "17"], "--max-num-seqs 16"),
        (["bench", "MODEL", "--k", "0"], "--k '0'"),
        (["bench", "MODEL", "--prompts", MISSING], "cannot be read"),
        (["bench", "MODEL", "--prompts", sys.executable], "not valid JSON"),
        (["bench", "MODEL", "--k", "99"], "max_draft_tokens=99"),
        (["bench", "MODEL", "--rounds", "-1"], "--rounds"),
        (["bench", "MODEL", "--workload", "none"], "--workload none"),
        (["bench", "MODEL", "--json", f"{MISSING}/f.json"], "the folder does not exist"),
        (["bench", "MODEL", "--json", "/proc/f.json"], "cannot be written"),
        (["bench", "MODEL", "--json", "/proc"], "is a folder"),
        (["bench", "MODEL", "--against", "none"], "--against none"),
        (["bench", "MODEL", "--rounds", "0", "--replays", "0"], "nothing to measure"),
        (["bench", "MODEL", "--speculate", "off"], "--speculate off: this command compares"),
        (["demo", "MODEL", "--speculate", "off"], "--speculate off: this command compares"),
        (["check-lossless", "MODEL", "--verification", "maybe"], "verification='maybe': allowed"),
        (["check-lossless", "MODEL", "--proposer", "off"], "off: this command compares"),
        (["check-lossless", "MODEL", "--proposer", "nope"], "unknown proposer 'nope'"),
        (["check-lossless", "MODEL", "--k", "99"], "max_draft_tokens=99"),
        (["check-lossless", "MODEL", "--k", "0"], "Invalid value for '--k'"),
        (["check-lossless", "MODEL", "--samples", "0"], "--samples"),
        (["check-lossless", "MODEL", "--samples", "2"], "greedy answers to a prompt are all"),
        (["check-lossless", "MODEL", "--temperature", "-1"], "temperature=-1"),
        (["check-lossless", "MODEL", "--prompt", " "], "--prompt: is empty"),
        (["check-lossless", "MODEL", "--prompts", MISSING], "cannot be read"),
        (["check-lossless", MISSING, "--json", "/proc"], "is a folder"),
        (["check-lossless", MISSING, "--json", f"{MISSING}/f.json"], "folder does not exist"),
        (["check-lossless", MISSING], "does not exist; allowed: a Hugging Face"),
        (["demo", MISSING], "does not exist"),
        (["chat", MISSING], "does not exist"),
    ],
)
def test_bad_input_is_one_line(
    cli: Cli, checkpoint: Path, arguments: list[str], message: str
) -> None:
    """Guards against tracebacks, silence or a wrong exit code for what a user got wrong."""
    result = cli(*(checkpoint if a == "MODEL" else a for a in arguments))
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("graphengine: error: ")
    assert result.err.count("\n") == 1, result.err
    assert message in result.err


@pytest.mark.parametrize("handler", ["strict", "surrogateescape"])  # Python's two ways with stdin
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_stdin_that_is_not_text(
    cli: Cli, checkpoint: Path, command: str, handler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against bytes that reach the tokenizer as something that it cannot take."""
    stdin = io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n"), encoding="utf-8", errors=handler)
    monkeypatch.setattr("sys.stdin", stdin)
    result = cli(command, checkpoint, *SMALL)
    assert result.code == 2
    assert re.search(r"error: .*not (UTF-8 text|valid Unicode)", result.err.splitlines()[-1])


def test_memory_that_cannot_be_had(cli: Cli, checkpoint: Path) -> None:
    """Guards against torch's own traceback where a cache is larger than any machine."""
    result = cli(
        "generate", checkpoint, "hi", "--num-blocks", (1 << 23) - 1, "--block-size", 256, *SMALL
    )
    assert result.code == 2
    assert "cannot be allocated" in result.err.splitlines()[-1]
    assert "lower CacheConfig.num_blocks" in result.err.splitlines()[-1]


def test_a_plan_over_its_budget_is_refused_after_it_is_shown(
    cli: Cli, checkpoint: Path, tmp_path: Path
) -> None:
    """Guards against a dry run that passes what a start refuses."""
    toml = tmp_path / "capture.toml"
    toml.write_text("memory_budget = 1000")
    result = cli("capture-plan", checkpoint, "--capture-config", toml)
    assert result.code == 2
    assert "static buffers" in result.out
    assert "memory_budget=1000: static buffers need" in result.err
    result = cli("capture-plan", checkpoint, "--num-blocks", (1 << 23) - 1, "--block-size", 256)
    assert result.code == 2
    assert "KV cache" in result.out
    assert "cannot be allocated" in result.err


def test_output_that_cannot_show_a_character() -> None:
    """Guards against an answer that stops where the terminal's encoding has no such character."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    show_anything(stream)
    stream.write("caf\u00e9")
    stream.flush()
    assert stream.buffer.getvalue() == b"caf?"  # type: ignore[attr-defined]


def test_traceback_on_request(checkpoint: Path) -> None:
    """Guards against an error that nobody can find the origin of."""
    with pytest.raises(ValueError, match="the prompt is empty"):
        run(["--traceback", "generate", str(checkpoint), " "])


def test_a_prompt_that_does_not_fit(cli: Cli, checkpoint: Path) -> None:
    """Guards against a traceback for what is only known after loading."""
    result = cli("generate", checkpoint, "x" * 600, *SMALL)
    assert result.code == 2
    assert "graphengine: error: " in result.err.splitlines()[-1]
    assert "Traceback" not in result.err


def test_ctrl_c_while_the_program_loads_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against pages of traceback in the seconds that torch takes to load."""

    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(entry, "import_module", interrupted)
    with pytest.raises(SystemExit) as caught:
        entry.main()
    assert caught.value.code == 130
    program = "import graphengine.cli, sys; sys.exit('torch' in sys.modules)"
    root = Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True)


def test_the_package_has_its_names() -> None:
    """Guards a public name that lazy loading has lost."""
    for name in graphengine.__all__:
        assert name in dir(graphengine)
        assert getattr(graphengine, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = graphengine.Nothing


def test_a_prompt_in_the_place_of_the_model_is_seen(cli: Cli, tmp_path: Path) -> None:
    """Guards the first command that everybody types, answered by "no prompt"."""
    result = cli("generate", "What is the moon?")
    assert result.code == 2
    assert "model 'What is the moon?' does not exist; allowed: a Hugging Face" in result.err
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    result = cli("generate", "smollm2-135m", "--file", empty)
    assert f"--file {empty}: is empty" in result.err


def test_ctrl_c_exits_130(checkpoint: Path) -> None:
    """Guards against a traceback, or exit code 0, where the user stopped the program."""
    program = "from graphengine.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "chat", str(checkpoint), "--max-tokens", "4", *SMALL],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).resolve().parents[3],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("hello\n")
    process.stdin.flush()
    assert process.stdout.readline() != ""  # it has answered and waits for the next message
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "Traceback" not in out
