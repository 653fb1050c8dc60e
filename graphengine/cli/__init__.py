"""The `graphengine` command."""

import sys
from importlib import import_module

__all__ = ["main"]


def main() -> None:
    """Entry point: load the program, which takes seconds in which Ctrl-C is as good as later."""
    try:
        app = import_module("graphengine.cli.app")
    except KeyboardInterrupt:
        sys.exit(130)
    app.main()
