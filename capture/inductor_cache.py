"""Inductor's on-disk cache: where it is, that what lies in it is whole, and whether it was hit.

Inductor rebuilds what is missing, but loads a binary that is there as it is: one cut short by a
full disk or a killed linker fails the compile or, worse, passes for a CPU without vector units,
which changes numerics. So cut binaries are removed first. Knows nothing of pieces.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from capture.cache import cache_dir, writable_dir

logger = logging.getLogger(__name__)

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def open_inductor_cache() -> Path:
    """`inductor/` below `cache_dir()`, freed of cut binaries; a fresh one if unwritable."""
    directory = writable_dir(cache_dir() / "inductor")
    for path in directory.glob("*/*.so"):
        # Inductor holds this lock while it builds: a half-linked file of another process is sound.
        lock = FileLock(directory / "locks" / f"{path.name.split('.')[0]}.lock", timeout=0)
        with suppress(Timeout), lock:
            if not _is_whole(path):
                logger.warning("compile cache: %s is damaged; rebuilding it", path)
                path.unlink()
    return directory


@contextmanager
def inductor_cache(directory: Path) -> Iterator[None]:
    """Point inductor at `directory`: it reads the variable at each use, torch sets it on import."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = str(directory)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before


def cache_hits() -> int:
    """How many compilations of this process were found in a cache."""
    counters = torch._dynamo.utils.counters
    return int(
        counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    )


def _is_whole(path: Path) -> bool:
    """Whether an ELF file has its section table, the last thing in it."""
    with path.open("rb") as file:
        header = file.read(64)
    if header[:5] != b"\x7fELF\x02":
        return False
    (offset,) = struct.unpack_from("<Q", header, 40)
    entry_size, count = struct.unpack_from("<HH", header, 58)
    return path.stat().st_size >= offset + entry_size * count
