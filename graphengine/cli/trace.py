"""`--trace`: the inspector's page of what a command generates.

Owns the flag, the check of its file before anything is loaded, and the command line as the page
shows it.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from graphengine.cli.console import note
from graphengine.engine import Engine
from graphengine.inspector import About, Recorder, write_page
from graphengine.sampling.params import SamplingParams

ALTERNATIVES: Final = 5  # likeliest tokens that the page shows beside each
MAX_PROMPT_WORDS: Final = 60  # characters of a prompt in the command line that is shown

TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        help="Write a page that shows where each token came from: drafts, probabilities, time.",
        metavar="FILE.html",
    ),
]


class Trace:
    """A page to be written.

    Args:
        path: None: none is.
        context: of the command.

    Raises:
        ValueError: the file cannot be written.
    """

    def __init__(self, path: Path | None, context: typer.Context) -> None:
        self._path = path
        self._command = command_line(context)
        if path is not None:
            _check_writable(path)

    def params(self, params: SamplingParams) -> SamplingParams:
        """With the log-probabilities that the page shows, which change no token."""
        return params if self._path is None else replace(params, logprobs=ALTERNATIVES)

    @contextmanager
    def recording(self, engine: Engine, model: str) -> Iterator[None]:
        """Around what is to be shown; writes the page at its end, an answer cut short included."""
        if self._path is None:
            yield
            return
        with Recorder(engine) as recorder:
            yield
        write_page(self._path, recorder, About(model=model, command=self._command), engine)
        note(f"wrote {self._path}")


def command_line(context: typer.Context) -> str:
    """What was typed, in full flags; of a path the last part, of a long prompt the beginning."""
    words = ["graphengine", str(context.info_name)]
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if source is None or source.name != "COMMANDLINE":
            continue
        value: Any = context.params[str(parameter.name)]
        flags = [*parameter.opts, *parameter.secondary_opts]
        is_argument = not flags[0].startswith("-")
        if isinstance(value, bool):
            words.append(parameter.opts[0] if value else parameter.secondary_opts[0])
        elif is_argument:
            words.append(_prompt(value) if parameter.name == "prompt" else _without_folder(value))
        else:
            words += [parameter.opts[0], _without_folder(value)]
    return shlex.join(words)


def _without_folder(value: object) -> str:
    return Path(str(value)).name or str(value)


def _prompt(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= MAX_PROMPT_WORDS else text[: MAX_PROMPT_WORDS - 1] + "…"


def _check_writable(path: Path) -> None:
    if path.is_dir():
        raise ValueError(f"--trace {path}: is a folder; name a file in it")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"--trace {path}: there is no folder {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"--trace {path}: cannot be written")
