"""Inductor's on-disk cache: where it is, that it is whole, and whether it was hit.

Inductor trusts what it finds: a damaged file fails the compile or, worse, passes for a CPU without
vector units, which changes numerics. So a manifest says what the last finished compile left, and a
cache that differs is emptied before use. Knows nothing of pieces.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from filelock import FileLock

from capture.cache import cache_dir, writable_dir

logger = logging.getLogger(__name__)

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_MANIFEST = "manifest.json"
_LOCK = "manifest.lock"
_INDUCTOR_LOCKS = "locks"


class InductorCache:
    """`inductor/` below `cache_dir()`, or a fresh directory where that cannot be written.

    Processes that share it compile one after the other, so the later ones find what the first made.
    """

    def __init__(self) -> None:
        self.directory = writable_dir(cache_dir() / "inductor")
        self._lock = FileLock(self.directory / _LOCK)
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
            manifest = json.dumps(self._digests(), indent=1)
            (self.directory / _MANIFEST).write_text(manifest, encoding="utf-8")

    def _empty_if_damaged(self) -> None:
        try:
            expected = json.loads((self.directory / _MANIFEST).read_text(encoding="utf-8"))
        except FileNotFoundError:
            expected = {}
        except ValueError:
            expected = None
        if self._digests() == expected:
            return
        logger.warning("compile cache %s is damaged or unfinished; rebuilding it", self.directory)
        for path in self.directory.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != _LOCK:
                path.unlink()

    def _digests(self) -> dict[str, str]:
        """Digest of every file, by relative path."""
        digests = {}
        for path in sorted(self.directory.glob("*/**/*")):
            name = path.relative_to(self.directory)
            if path.is_file() and name.parts[0] != _INDUCTOR_LOCKS:
                digests[str(name)] = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
        return digests


def cache_hits() -> int:
    """How many compilations of this process were found in a cache."""
    counters = torch._dynamo.utils.counters
    return int(
        counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    )
