"""Results files: checked before anything is measured, replaced in one stroke when all is.

Owns how a JSON result reaches the disk. A run that fails leaves the file of the last one as it was.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def check_target(file: Path) -> None:
    """Refuse early what `write_json` could only refuse after minutes of measuring.

    Raises:
        ValueError: the file cannot be written; the message says why.
    """
    target = file.resolve()
    if target.is_dir():
        raise ValueError(f"results file {file}: is a folder; name a file in it")
    if not target.parent.is_dir():
        raise ValueError(f"results file {file}: the folder does not exist")
    if target.exists() and not target.is_file():
        raise ValueError(f"results file {file}: is not a regular file")
    if target.exists() and not os.access(target, os.W_OK):
        raise ValueError(f"results file {file}: cannot be written (it is read-only)")
    temporary = _temporary(target)
    try:
        temporary.write_bytes(b"")
        temporary.unlink()
    except OSError as error:
        raise ValueError(f"results file {file}: cannot be written ({error.strerror})") from error


def write_json(file: Path, data: Mapping[str, Any], *, indent: int | None = 1) -> None:
    """Write `data` beside the file, then put it in the file's place, links followed.

    Raises:
        OSError: the disk is full, or the folder has gone.
    """
    target = file.resolve()
    temporary = _temporary(target)
    try:
        temporary.write_text(json.dumps(data, indent=indent) + "\n", encoding="utf-8")
        if target.exists():
            shutil.copymode(target, temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}.tmp")
