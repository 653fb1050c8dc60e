"""Versions of installed distributions."""

from __future__ import annotations

from importlib import metadata


def version(name: str) -> str | None:
    """Version of an installed distribution; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
