"""Inductor's on-disk cache: where it is, that it is whole, and whether it was hit.

Inductor trusts what it finds: a damaged file fails the compile or, worse, passes for a CPU without
vector units, which changes numerics. So a manifest says what the last finished compile left, and a
cache that differs is emptied before use. A file whose size and time are those of the manifest is
taken as read; others are read and their digests compared. Knows nothing of pieces.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from filelock import FileLock

from capture.cache import cache_dir, writable_dir

logger = logging.getLogger(__name__)

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_MANIFEST = "manifest.json"
_LOCK = "manifest.lock"
_INDUCTOR_LOCKS = "locks"
# A file written this shortly before the manifest may have been changed after it within the same
# tick of the file system's clock (2 s at worst), so its time proves nothing and it is read.
_TICK_NS = 2_000_000_000


class _File(NamedTuple):
    """One file as the manifest knows it."""

    size: int
    mtime_ns: int
    digest: str


class InductorCache:
    """`inductor/` below `cache_dir()`, or a fresh directory where that cannot be written.

    Processes that share it compile one after the other, so the later ones find what the first made.
    """

    def __init__(self) -> None:
        self.directory = writable_dir(cache_dir() / "inductor")
        self._lock = FileLock(self.directory / _LOCK)
        self._known: dict[str, _File] = {}
        self._written_ns = 0
        with self._lock:
            self._empty_if_damaged()

    @contextmanager
    def use(self) -> Iterator[None]:
        """While entered, what inductor compiles is looked up and stored here."""
        with self._lock:
            before = os.environ.get(_VARIABLE)
            # Inductor reads the variable at each use, and torch sets it on import.
            os.environ[_VARIABLE] = str(self.directory)
            try:
                yield
            finally:
                if before is None:
                    del os.environ[_VARIABLE]
                else:
                    os.environ[_VARIABLE] = before
            # Not reached by a failed compile: what it leaves is not to be trusted.
            self._write_manifest(self._scan(self._known, self._written_ns))

    def _empty_if_damaged(self) -> None:
        known, written_ns = self._read_manifest()
        if known is not None:
            found = self._scan(known, written_ns)
            if _digests(found) == _digests(known):
                self._known, self._written_ns = found, written_ns
                if any(file is not known[name] for name, file in found.items()):
                    self._write_manifest(found)  # now its time vouches for what was read
                return
        logger.warning("compile cache %s is damaged or unfinished; rebuilding it", self.directory)
        for path in self.directory.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != _LOCK:
                path.unlink()

    def _read_manifest(self) -> tuple[dict[str, _File] | None, int]:
        """What the last finished compile left, and when; None where the manifest is damaged."""
        path = self.directory / _MANIFEST
        try:
            entries = json.loads(path.read_text(encoding="utf-8"))
            known = {name: _File(*entry) for name, entry in entries.items()}
        except FileNotFoundError:
            return {}, 0
        except (ValueError, TypeError, AttributeError):
            return None, 0
        return known, path.stat().st_mtime_ns

    def _write_manifest(self, files: dict[str, _File]) -> None:
        self._known = files
        path = self.directory / _MANIFEST
        path.write_text(json.dumps(files, indent=1), encoding="utf-8")
        self._written_ns = path.stat().st_mtime_ns

    def _scan(self, known: dict[str, _File], written_ns: int) -> dict[str, _File]:
        """Every file, by relative path; `known` ones that have not been touched are not read."""
        files = {}
        for folder, subfolders, names in os.walk(self.directory):
            if folder == str(self.directory):
                subfolders[:] = [name for name in subfolders if name != _INDUCTOR_LOCKS]
                continue  # the manifest and its lock
            for path in (os.path.join(folder, name) for name in names):
                status, name = os.stat(path), os.path.relpath(path, self.directory)
                old = known.get(name)
                if (
                    old is not None
                    and (old.size, old.mtime_ns) == (status.st_size, status.st_mtime_ns)
                    and old.mtime_ns + _TICK_NS < written_ns
                ):
                    files[name] = old
                else:
                    files[name] = _File(status.st_size, status.st_mtime_ns, _digest(Path(path)))
        return files


def _digests(files: dict[str, _File]) -> dict[str, str]:
    return {name: file.digest for name, file in files.items()}


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def cache_hits() -> int:
    """How many compilations of this process were found in a cache."""
    counters = torch._dynamo.utils.counters
    return int(
        counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    )
