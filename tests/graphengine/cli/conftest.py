"""A tiny checkpoint, and command lines run in this process against it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from graphengine.cli.app import run
from tests.tiny import make_checkpoint

# A small table: starts in a second.
SMALL = ["--max-num-seqs", "1", "--max-model-len", "256"]


@dataclass(frozen=True, slots=True)
class Result:
    """What a command line left behind."""

    code: int
    out: str
    err: str


Cli = Callable[..., Result]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs `graphengine ARGUMENTS...` and returns its exit code and output."""

    def call(*arguments: object) -> Result:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Result(code, out, err)

    return call
