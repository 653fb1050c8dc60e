"""What a number was measured with: machine, versions, command, engine.

Owns the description that goes with every committed result. Reads /proc where there is one; a figure
that cannot be read is null.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from graphengine.engine import Engine
from graphengine.versions import version

_DISTRIBUTIONS = ("graphengine", "torch", "transformers", "tokenizers", "numpy", "gguf")


def describe(command: list[str]) -> dict[str, Any]:
    """Machine, versions and command, ready for JSON."""
    return {
        "command": command,
        "commit": commit(),
        "machine": {
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "usable_cores": len(os.sched_getaffinity(0)),
            "threads": torch.get_num_threads(),
            "ram_bytes": ram_bytes(),
            "system": platform.platform(),
            "load_average": list(os.getloadavg()),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in _DISTRIBUTIONS},
        },
        "environment": {
            name: without_folder(value)
            for name, value in sorted(os.environ.items())
            if name.startswith(("OMP_", "GOMP_", "KMP_", "GRAPHENGINE_"))
        },
    }


def describe_engine(engine: Engine) -> dict[str, Any]:
    """Configuration that the numbers depend on, and the seconds of each start-up phase."""
    resolved = engine.resolved
    return {
        "architecture": resolved.model.architecture,
        "dtype": str(resolved.dtype).removeprefix("torch."),
        "numerics": engine.config.numerics,
        "graph": engine.runner.manager.kind,
        "compile": engine.config.capture.compile,
        "max_num_seqs": resolved.sizes.max_num_seqs,
        "max_model_len": resolved.sizes.max_model_len,
        "draft_lengths": list(resolved.table.draft_lengths),
        "num_cells": len(resolved.table),
        "speculative": None if resolved.speculative is None else asdict(resolved.speculative),
        "start_seconds": dict(engine.start_times.seconds),
    }


def command_line(*program: str) -> list[str]:
    """`program` with this process's arguments, without the folders of this machine."""
    return [*program, *map(without_folder, sys.argv[1:])]


def without_folder(text: str) -> str:
    """An absolute path relative to the working folder, or its name alone outside; else the text.

    What is committed must not tell how one machine names its folders.
    """
    flag, equals, value = text.partition("=")
    if equals and flag.startswith("--"):
        return f"{flag}={without_folder(value)}"
    path = Path(text)
    if not path.is_absolute():
        return text
    inside = path.is_relative_to(Path.cwd())
    return str(path.relative_to(Path.cwd())) if inside else path.name


def commit() -> str | None:
    """Commit of the source tree that runs, `-dirty` behind it where files are changed."""
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        found = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, encoding="utf-8", check=False
        )
    except FileNotFoundError:
        return None
    return found.stdout.strip() or None


def cpu_model() -> str | None:
    """The processor's own name."""
    return _proc_field("cpuinfo", "model name") or platform.processor() or None


def ram_bytes() -> int | None:
    """Memory of the machine in bytes."""
    field = _proc_field("meminfo", "MemTotal")
    return int(field.split()[0]) * 1024 if field else None


def _proc_field(file: str, name: str) -> str | None:
    path = Path("/proc") / file
    if not path.is_file():
        return None
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None
