"""On-disk caches: where they live, how their keys are made, and small JSON entries in them.

A key is a digest of every fact that the cached thing depends on, named field by field. An entry
that cannot be read is rebuilt by its owner, never fatal; a directory that cannot be written costs
the cache, with a warning.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import platform
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

logger = logging.getLogger(__name__)


def cache_dir() -> Path:
    """`$GRAPHENGINE_CACHE_DIR`, else `~/.cache/graphengine`."""
    configured = os.environ.get("GRAPHENGINE_CACHE_DIR")
    return Path(configured) if configured else Path.home() / ".cache" / "graphengine"


def writable_dir(directory: Path) -> Path:
    """`directory`, made if needed; where it cannot be written, a fresh one and a warning.

    The fresh one is removed when this process exits.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except OSError as error:
        fallback = Path(tempfile.mkdtemp(prefix=f"graphengine-{directory.name}-"))
        atexit.register(_remove, fallback, os.getpid())
        logger.warning(
            "cache %s is not writable (%s): using %s for this process; set GRAPHENGINE_CACHE_DIR "
            "to a writable directory to keep what is compiled",
            directory,
            error,
            fallback,
        )
        return fallback


def _remove(directory: Path, owner: int) -> None:
    if os.getpid() == owner:  # and not a process that was forked from it
        shutil.rmtree(directory, ignore_errors=True)


def machine_facts() -> dict[str, object]:
    """What any numerics or timing result depends on besides its own configuration."""
    return {
        "cpu": cpu_features(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def cpu_features() -> str:
    """What a compiler sees of the CPU: architecture, and Linux's model and flags lines."""
    lines = {platform.machine(), platform.processor()}
    with suppress(OSError):
        wanted = ("model name", "cpu family", "flags", "Features", "CPU part")
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        lines |= {line for line in text.splitlines() if line.startswith(wanted)}
    return "\n".join(sorted(lines))


def cache_key(facts: Mapping[str, object]) -> str:
    """Digest of the facts; any change of any value changes it."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def read_entry(kind: str, key: str) -> dict[str, object] | None:
    """A stored entry, or None where there is none or it is unreadable (a warning says so)."""
    path = cache_dir() / kind / f"{key}.json"
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("cache entry %s is unreadable (%s); rebuilding it", path, error)
        return None
    if not isinstance(entry, dict):
        logger.warning("cache entry %s is not an object; rebuilding it", path)
        return None
    return entry


def write_entry(kind: str, key: str, entry: Mapping[str, object]) -> None:
    """Store an entry atomically; where the directory is not writable, warn and go on without."""
    path = cache_dir() / kind / f"{key}.json"
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(entry, indent=1, default=str), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        logger.warning(
            "cache entry %s cannot be written (%s); it will be rebuilt next time", path, error
        )
