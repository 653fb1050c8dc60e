"""The command line: commands, version, and what an error looks like.

Owns the exit codes: 0, 1 (a check failed), 2 (the user's input was refused, one line on stderr),
130 (Ctrl-C). A traceback means a bug in this program, or was asked for with --traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, cast

import typer

from graphengine.cli import bench, chat, check_lossless, demo, generate, plan, train_draft
from graphengine.cli.console import note, one_line, show_anything
from graphengine.kernels.build import BuildError
from graphengine.versions import version

REFUSED, INTERRUPTED = 2, 130

# The base of all usage errors of the click that typer runs on, which may be a copy of its own.
_UsageError = cast(type[Exception], typer.BadParameter.__mro__[1])

app = typer.Typer(
    name="graphengine",
    help="LLM decoding through pre-captured steps, sped up without changing one token.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("bench")(bench.bench)
app.command("check-lossless")(check_lossless.check_lossless)
app.command("capture-plan")(plan.capture_plan)
app.command("proposers")(plan.proposers)
app.command("train-draft")(train_draft.train_draft)
app.command("demo")(demo.demo)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"graphengine {version('graphengine') or '(not installed, so without a version)'}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where an error came from.")
    ] = False,
) -> None:
    """Help where no command is named; `run` looks at --traceback itself."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code.

    Args:
        arguments: without the program's name.
    """
    try:
        code = app(args=list(arguments), prog_name="graphengine", standalone_mode=False)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except typer.Abort:
        code = INTERRUPTED
    except _UsageError as error:
        code = _refuse(cast(typer.BadParameter, error).format_message())
    except BrokenPipeError:
        raise
    except (ValueError, OSError, BuildError) as error:
        if "--traceback" in arguments:
            raise
        code = _refuse(error)
    if code == INTERRUPTED:
        note("")  # the shell's prompt gets a line of its own
    return code if isinstance(code, int) else 0


def _refuse(message: object) -> int:
    note(f"graphengine: error: {one_line(message)}")
    return REFUSED


def main() -> None:
    """Entry point of the `graphengine` command."""
    show_anything(sys.stdout)
    show_anything(sys.stderr)
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has gone; nothing more can be written, at exit neither.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)
