"""Builds the kernel library from the packaged C++ sources, once per machine.

Owns the compiler choice, the flags and the library's place in the cache. The key holds everything
that can change the code: sources, flags, compiler version, CPU features. A file's name carries the
digest of its content, so that a damaged one is seen before it is mapped. Knows nothing of what is
exported.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# torch first: its wheel brings libgomp, and our library must join that copy, not load a second one
# (two thread pools would spin against each other).
import torch  # noqa: F401

from capture.cache import cache_dir, cache_key, cpu_features, writable_dir
from capture.ops import MAX_NATIVE_ARGS

logger = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
# Fused multiply-adds are explicit in the sources; the compiler may neither make nor split one.
FLAGS = (
    "-O3",
    "-std=c++17",
    "-fopenmp",
    "-fPIC",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    f"-DMAX_NATIVE_ARGS={MAX_NATIVE_ARGS}",
)
PARALLEL_COMPILES = 2


class BuildError(RuntimeError):
    """The kernels cannot be built on this machine; the message says what is missing or failed."""


@dataclass(frozen=True, slots=True)
class Built:
    """The loaded library, and whether the cache had it."""

    library: ctypes.CDLL
    cached: bool


def build(extra_flags: Sequence[str] = ()) -> Built:
    """Load the library, compiling it where the cache has no sound copy.

    A cache that can only be read serves what it holds. `extra_flags` come last on the compiler's
    command line and are part of the key (the tests build the portable vectors with them). Raises
    BuildError where there is no compiler or it fails.
    """
    directory = cache_dir() / "kernels" / library_key(extra_flags)
    for path in sorted(directory.glob("kernels-*.so")):
        library = _load_sound(path)
        if library is not None:
            return Built(library, cached=True)
    compiled = _compile(all_flags(extra_flags), writable_dir(directory))
    return Built(ctypes.CDLL(str(compiled)), cached=False)


def find_compiler() -> str:
    """Path of $CXX or of the first C++ compiler on PATH."""
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else COMPILERS:
        path = shutil.which(name)
        if path:
            return path
    given = (
        f"CXX={wanted} is not on PATH" if wanted else f"none of {', '.join(COMPILERS)} is on PATH"
    )
    raise BuildError(
        f"the CPU kernels need a C++17 compiler with OpenMP, and {given}: "
        "install g++ (for example `apt-get install g++`) or set CXX to a compiler"
    )


def native_flag() -> str:
    """The flag that targets this CPU: -march on x86, -mcpu elsewhere (clang on ARM wants that)."""
    x86 = platform.machine().lower() in ("x86_64", "amd64", "i686")
    return "-march=native" if x86 else "-mcpu=native"


def library_key(extra_flags: Sequence[str] = ()) -> str:
    """Digest of everything that can change the built code."""
    files = (*sources(), *sorted(SOURCE_DIR.glob("*.h")))
    return cache_key(
        {
            "compiler": _run([find_compiler(), "--version"]),
            "flags": all_flags(extra_flags),
            "cpu": cpu_features(),
            "sources": {path.name: path.read_text(encoding="utf-8") for path in files},
        }
    )


def all_flags(extra_flags: Sequence[str] = ()) -> tuple[str, ...]:
    return (*FLAGS, native_flag(), *extra_flags)


def sources() -> list[Path]:
    return sorted(SOURCE_DIR.glob("*.cpp"))


def _load_sound(path: Path) -> ctypes.CDLL | None:
    """The library at `path`; where it is damaged or cannot be loaded, removes it and gives None."""
    reason = "its content does not match its digest"
    try:
        if _file_name(path.read_bytes()) == path.name:
            return ctypes.CDLL(str(path))
    except FileNotFoundError:
        return None  # another process has found it damaged and removed it
    except OSError as error:
        reason = str(error)
    logger.warning("cached kernel library %s is unusable (%s): rebuilding", path, reason)
    with suppress(OSError):  # a cache that cannot be written keeps it, and is left for another
        path.unlink()
    return None


def _file_name(content: bytes) -> str:
    return f"kernels-{hashlib.sha256(content).hexdigest()[:16]}.so"


def _compile(flags: Sequence[str], directory: Path) -> Path:
    """Compile the sources side by side, link, and publish by one rename: builders may race."""
    compiler = find_compiler()
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources()]
        commands = [
            [compiler, *flags, "-c", str(source), "-o", str(target)]
            for source, target in zip(sources(), objects, strict=True)
        ]
        with ThreadPoolExecutor(PARALLEL_COMPILES) as pool:
            list(pool.map(_run, commands))
        linked = Path(scratch) / "kernels.so"
        _run([compiler, *flags, "-shared", *map(str, objects), "-o", str(linked)])
        target = directory / _file_name(linked.read_bytes())
        os.replace(linked, target)
    return target


def _run(command: Sequence[str]) -> str:
    """What the compiler prints."""
    failed = f"the compiler failed on the CPU kernels: {' '.join(command)}\n"
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(failed + str(error)) from error
    if result.returncode != 0:
        raise BuildError(failed + result.stderr.strip())
    return result.stdout
