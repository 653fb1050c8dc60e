"""What a user sees of an error: one line on stderr and exit code 2; 130 for Ctrl-C."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from graphengine.cli.app import run
from tests.graphengine.cli.conftest import SMALL, Cli

MISSING = "/nonexistent/path"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "No such command 'nope'"),
        (["generate", "--bogus"], "No such option"),
        (["generate", "--max-tokens", "x"], "--max-tokens"),
        (["generate", "MODEL", "hi", "--max-tokens", "0"], "max_tokens = 0"),
        (["generate", MISSING, "hi"], "does not exist"),
        (["generate", "MODEL", "hi", "--file", "f"], "given twice"),
        (["generate", "MODEL", "--file", MISSING], "cannot be read"),
        (["generate", "MODEL", " "], "the prompt is empty"),
        (["generate", "MODEL", "hi", "--dtype", "int3"], "dtype='int3': allowed are auto"),
        (["generate", "MODEL", "hi", "--speculate", "nope"], "unknown proposer 'nope'"),
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
        (["bench", "MODEL", "--workload", "none"], "--workload none"),
        (["bench", "MODEL", "--json", f"{MISSING}/f.json"], "the folder does not exist"),
        (["bench", "MODEL", "--json", "/proc/f.json"], "cannot be written"),
        (["bench", "MODEL", "--json", "/proc"], "is a folder"),
        (["bench", "MODEL", "--against", "none"], "--against none"),
        (["bench", "MODEL", "--rounds", "0", "--replays", "0"], "nothing to measure"),
        (["bench", "MODEL", "--speculate", "off"], "--speculate off: this command compares"),
        (["demo", "MODEL", "--speculate", "off"], "--speculate off: this command compares"),
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
