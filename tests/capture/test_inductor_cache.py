"""InductorCache: used only as the last finished compile left it. Nothing is compiled here."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from capture import inductor_cache
from capture.inductor_cache import InductorCache

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRAPHENGINE_CACHE_DIR", str(tmp_path))
    return tmp_path / "inductor"


def compile_something(cache: InductorCache) -> None:
    with cache.use():
        for name in ("ab/kernel.so", "fxgraph/c/d/entry", "locks/kernel.lock"):
            path = cache.directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"sound" * 100)


def test_a_sound_cache_is_kept(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    compile_something(InductorCache())
    (directory / "locks" / "another.lock").write_text("")  # inductor's own, of no meaning
    InductorCache()
    assert (directory / "ab" / "kernel.so").exists()
    compile_something(InductorCache())
    InductorCache()
    assert not caplog.records


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut binary": lambda root: os.truncate(root / "ab/kernel.so", 10),
    "changed byte": lambda root: (root / "fxgraph/c/d/entry").write_bytes(b"s0und" * 100),
    "empty file": lambda root: (root / "ab/kernel.so").write_bytes(b""),
    "lost file": lambda root: (root / "ab/kernel.so").unlink(),
    "file of a killed compile": lambda root: (root / "ab/half.so").write_bytes(b"so"),
    "cut manifest": lambda root: os.truncate(root / "manifest.json", 10),
    "binary manifest": lambda root: (root / "manifest.json").write_bytes(b"\xff\xfe"),
    "odd manifest": lambda root: (root / "manifest.json").write_text("[1]"),
    "no manifest": lambda root: (root / "manifest.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_emptied_with_a_warning(
    directory: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """Guards case 58: inductor fails on damage, or takes the CPU for one without vectors."""
    compile_something(InductorCache())
    DAMAGE[damage](directory)
    with caplog.at_level(logging.WARNING):
        cache = InductorCache()
    assert "damaged or unfinished; rebuilding it" in caplog.text
    assert [path.name for path in directory.iterdir()] == ["manifest.lock"]
    caplog.clear()
    compile_something(cache)
    InductorCache()
    assert not caplog.records


def age(directory: Path, seconds: int = 60) -> None:
    """Set the clock of every file back, the manifest's included, as if compiled a while ago."""
    for path in directory.rglob("*"):
        status = path.stat()
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - seconds * 10**9))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose content is read."""
    names: list[str] = []
    digest = inductor_cache._digest

    def spy(path: Path) -> str:
        names.append(path.name)
        return digest(path)

    monkeypatch.setattr(inductor_cache, "_digest", spy)
    return names


def test_an_old_cache_is_read_once_and_then_trusted(directory: Path, read: list[str]) -> None:
    """Guards the start against reading the whole cache each time."""
    compile_something(InductorCache())
    age(directory)
    read.clear()
    InductorCache()  # the manifest is as young as the files: their times prove nothing yet
    assert sorted(read) == ["entry", "kernel.so"]
    read.clear()
    cache = InductorCache()
    assert not read
    with cache.use():
        (directory / "ab" / "new.so").write_bytes(b"new")
    assert read == ["new.so"]


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_of_a_trusted_cache_is_found(
    directory: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """Guards the check that skips files: whatever is written changes a size or a time."""
    compile_something(InductorCache())
    age(directory)
    InductorCache()
    DAMAGE[damage](directory)
    InductorCache()
    assert "damaged or unfinished; rebuilding it" in caplog.text
    assert not (directory / "ab").exists()


def test_a_copied_cache_is_read_and_kept(
    directory: Path, read: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Guards caches that are baked into an image, where every file's time is new."""
    compile_something(InductorCache())
    age(directory)
    InductorCache()
    for path in directory.rglob("*"):
        os.utime(path)
    read.clear()
    InductorCache()
    assert sorted(read) == ["entry", "kernel.so"]
    assert not caplog.records


def test_what_a_failed_compile_leaves_is_not_trusted(
    directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "/of/the/user")
    cache = InductorCache()
    compile_something(cache)

    def fail() -> None:
        with cache.use():
            (directory / "ab" / "half.so").write_bytes(b"so")
            raise RuntimeError("compiler error")

    with pytest.raises(RuntimeError, match="compiler error"):
        fail()
    assert os.environ[VARIABLE] == "/of/the/user"
    InductorCache()
    assert "damaged or unfinished" in caplog.text
    assert not (directory / "ab").exists()


@pytest.mark.parametrize("before", [None, "/of/the/user"])
def test_other_code_of_the_process_keeps_its_own_cache(
    directory: Path, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    """Guards against moving the user's own torch.compile cache, and against theirs moving ours."""
    monkeypatch.delenv(VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(VARIABLE, before)
    with InductorCache().use():
        assert os.environ[VARIABLE] == str(directory)
    assert os.environ.get(VARIABLE) == before


def test_processes_compile_one_after_the_other(directory: Path) -> None:
    """Guards against a start that takes another process's half-built files for damage."""
    other = FileLock(directory / "manifest.lock", timeout=0)
    with InductorCache().use(), pytest.raises(Timeout):
        other.acquire()
    with other:
        pass


def test_an_unwritable_directory_costs_the_cache_only(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards case 58. A file in the directory's place refuses even root."""
    directory.write_text("not a directory")
    cache = InductorCache()
    assert "is not writable" in caplog.text
    assert cache.directory != directory
    compile_something(cache)
    assert directory.read_text() == "not a directory"
