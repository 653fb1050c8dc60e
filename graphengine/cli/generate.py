"""`graphengine generate`: one prompt in, its answer streamed to stdout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from graphengine.cli import drafts
from graphengine.cli.answer import Answer
from graphengine.cli.console import has_colour, note, read_stdin, stdout
from graphengine.cli.options import (
    DisplayOptions,
    EngineOptions,
    Model,
    SamplingOptions,
    command,
    open_engine,
)
from graphengine.cli.trace import Trace, TraceFile
from graphengine.engine import Engine
from graphengine.models.locate import DEMO_MODEL, locate_model
from graphengine.models.tokenizer import check_unicode

MAX_TOKENS = 256  # where neither flag nor checkpoint says


@command
def generate(
    *,
    context: typer.Context,
    model: Model = DEMO_MODEL,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - or nothing: read it from stdin.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Read the prompt from a file.")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Put the prompt into the chat template, or continue it as it is. "
            "Default: chat where the model has a template.",
            show_default=False,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help=f"Most tokens of the answer. Default: {MAX_TOKENS}.")
    ] = None,
    trace: TraceFile = None,
    display: DisplayOptions,
    sampling: SamplingOptions,
    options: EngineOptions,
) -> None:
    """Answer a prompt, streaming the text to stdout."""
    params = sampling.params(model, max_tokens, MAX_TOKENS)
    locate_model(model)  # first: a prompt alone was taken for the model
    page = Trace(trace, context)
    text = read_prompt(prompt, file)
    engine = open_engine(model, options.config())
    try:
        colour = display.show_drafts and has_colour(stdout())
        if display.show_drafts:
            note(drafts.legend(colour=colour))
        answer = Answer(engine, colour_drafts=colour)
        prompt_ids = encode(engine, text, chat)
        with page.recording(engine, model):
            output = answer.stream(prompt_ids, page.params(params))
        if display.stats:
            note(answer.figures(output))
    finally:
        engine.close()
    if answer.interrupted:
        raise typer.Exit(130)


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from wherever it was given.

    Raises:
        ValueError: given twice, not at all, unreadable or empty.
    """
    if file is not None:
        if prompt is not None:
            raise ValueError("the prompt is given twice: as an argument and by --file; drop one")
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--file {file}: cannot be read ({error.strerror})") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"--file {file}: not UTF-8 text ({error.reason})") from error
    elif prompt is not None and prompt != "-":
        text = prompt
    elif prompt is None and sys.stdin.isatty():
        raise ValueError("no prompt: give it as an argument, by --file FILE, or on stdin")
    else:
        text = read_stdin(sys.stdin.read)
    # The line break at the end of a file or of echo's output is not part of the prompt.
    text = text.removesuffix("\n")
    if not text.strip():
        raise ValueError("the prompt is empty" if file is None else f"--file {file}: is empty")
    check_unicode("the prompt", text)
    return text


def encode(engine: Engine, text: str, chat: bool | None) -> list[int]:
    """Token ids of a prompt, in the chat template or raw; None: chat where there is a template.

    Raises:
        ValueError: no tokenizer, or --chat without a template.
    """
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise ValueError("the checkpoint has no tokenizer, so it cannot read a text prompt")
    if chat is False or (chat is None and not tokenizer.has_chat_template):
        return tokenizer.encode(text)
    return tokenizer.apply_chat_template([{"role": "user", "content": text}])
