"""Build cache, function table, program replay and the shared thread pool."""

import ctypes
import logging
import platform
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from capture.ops import MAX_NATIVE_ARGS, NativeOp
from graphengine.kernels import build as build_module
from graphengine.kernels import library
from graphengine.kernels.build import build
from graphengine.kernels.library import FUNCTIONS, address
from graphengine.kernels.ops import native_op
from tests.graphengine.kernels.calls import Kernels, empty, eps, threads, words

STUB = 'extern "C" __attribute__((visibility("default"))) long answer() { return 42; }\n'


@pytest.fixture
def tiny_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A one-line library and an empty cache, so that these tests do not compile the real one."""
    source_dir = tmp_path / "sources"
    source_dir.mkdir()
    (source_dir / "answer.cpp").write_text(STUB)
    monkeypatch.setattr(build_module, "SOURCE_DIR", source_dir)
    monkeypatch.setenv("GRAPHENGINE_CACHE_DIR", str(tmp_path / "cache"))
    return source_dir


def _built(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "kernels").glob("*/kernels-*.so"))


@pytest.mark.usefixtures("tiny_sources")
def test_second_build_comes_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm start must not run the compiler, and must know that it did not."""
    assert not build().cached
    monkeypatch.setattr(build_module, "_compile", lambda *_: pytest.fail("compiled again"))
    again = build()
    assert again.cached
    assert again.library.answer() == 42
    assert len(_built(tmp_path)) == 1


@pytest.mark.usefixtures("tiny_sources")
def test_a_cache_that_can_only_be_read_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache baked into an image must not be compiled again into a new folder at every start."""
    build()
    (path,) = _built(tmp_path)
    path.parent.chmod(0o500)  # keeps nobody out who is root, so that asking is a fault, too
    monkeypatch.setattr(build_module, "writable_dir", lambda _: pytest.fail("asked to write"))
    try:
        assert build().cached
    finally:
        path.parent.chmod(0o700)


@pytest.mark.usefixtures("tiny_sources")
def test_a_library_that_another_process_removes_is_built(tmp_path: Path) -> None:
    """Two starts that find the same damaged file: the slower one must not fail on its absence."""
    build()
    (path,) = _built(tmp_path)
    path.unlink()
    path.symlink_to(tmp_path / "removed")  # listed, and gone when it is opened
    assert not build().cached


@pytest.mark.parametrize("cached", [False, True])
def test_loading_tells_whether_it_compiled(cached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that calls itself warm after a compile, or cold where a process starts a second."""
    built = build_module.Built(library.load(), cached)
    monkeypatch.setattr(library, "_built", cache(lambda: built))
    assert library.ensure_loaded() == cached
    assert library.ensure_loaded()


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="-march of x86")
def test_the_avx512_form_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the branches that no machine of ours can run; nothing of the result is called."""
    monkeypatch.setenv("GRAPHENGINE_CACHE_DIR", str(tmp_path / "cache"))
    build(("-march=x86-64-v4",))
    assert len(_built(tmp_path)) == 1


def test_changed_sources_are_another_key(tiny_sources: Path, tmp_path: Path) -> None:
    """A stale library after an upgrade would run old arithmetic."""
    build()
    (tiny_sources / "answer.cpp").write_text(STUB.replace("42", "43"))
    assert build().library.answer() == 43
    build(("-DOTHER",))
    assert len(_built(tmp_path)) == 3


@pytest.mark.usefixtures("tiny_sources")
@pytest.mark.parametrize("damage", ["truncate", "flip", "empty"])
def test_damaged_file_is_rebuilt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """A half-written file (full disk, killed builder) must be replaced, not mapped."""
    build()
    (path,) = _built(tmp_path)
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 0xFF
    path.unlink()
    path.write_bytes({"truncate": content[:1000], "flip": content, "empty": bytearray()}[damage])
    with caplog.at_level(logging.WARNING):
        assert build().library.answer() == 42
    assert "unusable" in caplog.text


@pytest.mark.usefixtures("tiny_sources")
def test_unwritable_cache_falls_back_loudly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A read-only home must cost a compile and a warning, not the start."""
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("GRAPHENGINE_CACHE_DIR", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        assert build().library.answer() == 42
    assert "not writable" in caplog.text


@pytest.mark.usefixtures("tiny_sources")
def test_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install, not FileNotFoundError."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match=r"CXX=no-such-compiler is not on PATH.*install g\+\+"):
        build()


@pytest.mark.usefixtures("tiny_sources")
@pytest.mark.parametrize(
    ("script", "reason"),
    [("#!/bin/sh\necho no licence >&2\nexit 3\n", "no licence"), ("no program\n", "Exec format")],
)
def test_a_compiler_that_does_not_run_is_named(
    script: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken compiler must not end a start with a traceback of subprocess."""
    compiler = tmp_path / "broken-c++"
    compiler.write_text(script)
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(build_module.BuildError, match=rf"broken-c\+\+ --version\n.*{reason}"):
        build()


def test_compile_error_shows_the_compiler(tiny_sources: Path) -> None:
    """A broken toolchain must show its own message."""
    (tiny_sources / "answer.cpp").write_text("this is not C++\n")
    with pytest.raises(RuntimeError, match=r"compiler failed on the CPU kernels(.|\n)*error"):
        build()


def test_table_matches_the_header() -> None:
    """A wrong argument count would call C with garbage."""
    header = (build_module.SOURCE_DIR / "abi.h").read_text().replace("\\\n", " ")
    found = {}
    for name, arguments in re.findall(r"EXPORT void ([\w#]+)\(([^)]*)\)", header):
        kinds = tuple("pointer" if "*" in a else "int" for a in arguments.split(","))
        for suffix in ("bf16", "f32") if "##" in name else ("",):
            found[name.replace("##SUFFIX", suffix)] = kinds
    assert found == {name: function.kinds for name, function in FUNCTIONS.items()}


def test_calls_are_checked() -> None:
    """A recorded call with a missing argument must fail at record time."""
    with pytest.raises(TypeError, match="rms_norm takes 6 arguments, got 2"):
        native_op("rms_norm").encode((1, 2))
    with pytest.raises(ValueError, match="no kernel named 'nope'"):
        native_op("nope")
    call = native_op("rms_norm").encode((1, 2, 3, 4, 5, 6))
    assert call == [address("rms_norm"), 6, 1, 2, 3, 4, 5, 6, *[0] * 14]


@pytest.mark.parametrize("num_args", range(1, MAX_NATIVE_ARGS + 1))
def test_the_loop_passes_every_number_of_arguments(native: Kernels, num_args: int) -> None:
    """Guards against a stride or a maximum of the native loop that is not the encoder's."""
    signature = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * num_args)
    seen: list[tuple[int, ...]] = []
    callback = signature(lambda *arguments: seen.append(arguments))
    address_of = ctypes.cast(callback, ctypes.c_void_p).value
    assert address_of is not None
    op = NativeOp("callback", address_of, num_args)
    calls = [tuple(range(start, start + num_args)) for start in (1, 100, -50)]
    program = torch.tensor([op.encode(arguments) for arguments in calls])
    native.call("run_calls", program, len(calls))
    assert seen == calls


@pytest.mark.parametrize("count", [1, 2])
def test_replay_gives_the_bits_of_the_calls(native: Kernels, count: int) -> None:
    """The tape must be the calls: each sees what the calls before it wrote."""
    rows, width, hidden = 5, 96, 200
    x, weight = torch.randn(rows, width), torch.randn(width)
    up, down = torch.randn(2 * hidden, width).bfloat16(), torch.randn(width, hidden).bfloat16()

    def buffers() -> tuple[torch.Tensor, ...]:
        return x.clone(), empty(rows, width), empty(rows, hidden), empty(rows, dtype=torch.int32)

    def calls(
        residual: torch.Tensor, normed: torch.Tensor, gated: torch.Tensor, ids: torch.Tensor
    ) -> list[tuple[str, list[int]]]:
        layer = [
            ("rms_norm", words(normed, residual, weight, rows, width, epsilon)),
            ("gate_up_bf16", words(gated, normed, up, rows, hidden, width)),
            ("linear_bf16", words(residual, gated, down, None, rows, width, hidden, 1)),
        ]
        return [*layer * 3, ("argmax_rows", words(ids, residual, rows, width))]

    epsilon = eps()
    called, replayed = buffers(), buffers()
    with threads(count):
        for name, arguments in calls(*called):
            getattr(native.library, name)(*arguments)
        program = [native_op(name).encode(tuple(args)) for name, args in calls(*replayed)]
        native.call("run_calls", torch.tensor(program), len(program))
    for a, b in zip(called, replayed, strict=True):
        assert torch.equal(a, b)


def _file_of(symbol: Any) -> str:
    """The mapped file that holds a function."""
    at = ctypes.cast(symbol, ctypes.c_void_p).value or 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(word, 16) for word in line.split()[0].split("-"))
        if begin <= at < end:
            return line.split()[-1]
    raise AssertionError(f"address {at:#x} is not mapped")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_kernels_and_torch_share_one_openmp_runtime(native: Kernels) -> None:
    """Two runtimes mean two thread pools that spin against each other: ten times slower."""
    torch_library = next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))
    ours = _file_of(native.library.omp_get_max_threads)
    assert ours == _file_of(ctypes.CDLL(str(torch_library)).omp_get_max_threads)
    for count in (1, 3):
        with threads(count):
            assert native.library.omp_get_max_threads() == count
