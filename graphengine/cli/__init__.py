"""The `graphengine` command."""

from graphengine.cli.app import main

__all__ = ["main"]
