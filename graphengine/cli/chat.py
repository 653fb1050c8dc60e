"""`graphengine chat`: a conversation, turn by turn.

Owns the conversation and its commands. Reads lines from a terminal or a pipe alike; answers go to
stdout, everything else to stderr.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Annotated

import typer

from graphengine.cli import drafts
from graphengine.cli.answer import Answer
from graphengine.cli.console import has_colour, note, one_line, read_stdin, stdout
from graphengine.cli.options import (
    DisplayOptions,
    EngineOptions,
    Model,
    SamplingOptions,
    command,
    open_engine,
)
from graphengine.engine import Engine
from graphengine.models.locate import DEMO_MODEL
from graphengine.models.tokenizer import check_unicode
from graphengine.sampling.params import SamplingParams

with suppress(ImportError):  # not in every Python build; input() is then without line editing
    import readline  # noqa: F401

MAX_TOKENS = 512  # where neither flag nor checkpoint says
HELP = "/reset starts over, /quit or Ctrl-D ends, Ctrl-C stops an answer"


@command
def chat(
    *,
    model: Model = DEMO_MODEL,
    max_tokens: Annotated[
        int | None, typer.Option(help=f"Most tokens of an answer. Default: {MAX_TOKENS}.")
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="A system message before the conversation.")
    ] = None,
    display: DisplayOptions,
    sampling: SamplingOptions,
    options: EngineOptions,
) -> None:
    """Talk with a model. /reset starts over, /quit or Ctrl-D ends, Ctrl-C stops an answer."""
    params = sampling.params(model, max_tokens, MAX_TOKENS)
    check_unicode("--system", system or "")
    engine = open_engine(model, options.config())
    try:
        if engine.tokenizer is None or not engine.tokenizer.has_chat_template:
            raise ValueError(f"model {model} has no chat template; use generate --raw")
        colour = display.show_drafts and has_colour(stdout())
        if display.show_drafts:
            note(drafts.legend(colour=colour))
        conversation = Conversation(engine, params, system=system, colour_drafts=colour)
        _converse(conversation, stats=display.stats)
    finally:
        engine.close()


class Conversation:
    """The messages so far, and the next turn.

    Args:
        engine: idle, with a chat template.
        params: of every answer.
        system: message before the conversation; None: none.
        colour_drafts: colour tokens by origin.
    """

    def __init__(
        self, engine: Engine, params: SamplingParams, *, system: str | None, colour_drafts: bool
    ) -> None:
        self._engine = engine
        self._params = params
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._colour_drafts = colour_drafts
        self.messages = list(self._system)

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = list(self._system)

    def turn(self, text: str) -> tuple[Answer, str]:
        """Answer a message, streaming to stdout; returns the answer and its figures.

        Raises:
            ValueError: the conversation does not fit the context; it is as it was before.
        """
        tokenizer = self._engine.tokenizer
        assert tokenizer is not None, "checked at start"
        messages = [*self.messages, {"role": "user", "content": text}]
        answer = Answer(self._engine, colour_drafts=self._colour_drafts)
        output = answer.stream(tokenizer.apply_chat_template(messages), self._params)
        reply = {"role": "assistant", "content": output.outputs[0].text}
        self.messages = [*messages, reply]
        return answer, answer.figures(output)


def _converse(conversation: Conversation, *, stats: bool) -> None:
    interactive = sys.stdin.isatty()
    if interactive:
        note(HELP)
    prompt = "> " if interactive and sys.stdout.isatty() else ""
    while True:
        try:
            text = read_stdin(lambda: input(prompt))
        except EOFError:
            break
        command_name = text.strip()
        if command_name == "/quit":
            break
        if command_name == "/reset":
            conversation.reset()
        elif command_name.startswith("/"):
            note(f"unknown command {command_name}; {HELP}")
        elif command_name:
            _turn(conversation, text, interactive=interactive, stats=stats)
    if interactive:
        note("")


def _turn(conversation: Conversation, text: str, *, interactive: bool, stats: bool) -> None:
    try:
        answer, figures = conversation.turn(text)
    except ValueError as error:
        if not interactive:
            raise
        note(f"{one_line(error)}; /reset starts over")
        return
    if stats:
        note(figures)
    if answer.interrupted and not interactive:
        raise KeyboardInterrupt
