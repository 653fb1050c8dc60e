"""compile_check: every kernel module is in its list, and it says what does not compile."""

import os
import pkgutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import graphengine.triton_kernels
from graphengine.triton_kernels import compile_check

pytest.importorskip("triton")


Done = subprocess.CompletedProcess[str]
BROKEN = """
import triton
import triton.language as tl
from graphengine.triton_kernels.compile_check import compile_all
from graphengine.triton_kernels.specs import KernelSpec

@triton.jit
def kernel(out, SIZE: tl.constexpr):
    tl.store(out + tl.arange(0, SIZE), 1.0)

def spec(name, size, **more):
    return KernelSpec(name, kernel, {"out": "*fp32"}, {"SIZE": size, **more})

if __name__ == "__main__":
    specs = [spec("good", 16), spec("odd", 3), spec("unknown", 16, WIDTH=1)]
    print(compile_all(specs, [90]))
"""


def run_python(*arguments: str, interpret: bool = False) -> Done:
    """A process of its own, where kernels are compiled and not interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def run_check(*arguments: str, interpret: bool = False) -> Done:
    command = ("-m", "graphengine.triton_kernels.compile_check", *arguments)
    return run_python(*command, interpret=interpret)


def test_no_module_of_kernels_is_missing() -> None:
    """A module left out of the list would never be compiled before it meets a GPU."""
    package = graphengine.triton_kernels
    found = [
        name
        for _, name, _ in pkgutil.iter_modules(package.__path__)
        if hasattr(import_module(f"{package.__name__}.{name}"), "COMPILED")
    ]
    assert sorted(compile_check.MODULES) == sorted(found)


def test_interpreted_kernels_are_refused() -> None:
    """Interpreted functions have no machine code: a pass would say nothing."""
    done = run_check(interpret=True)
    assert done.returncode == 2
    assert "TRITON_INTERPRET is set" in done.stderr


def test_a_few_kernels_compile() -> None:
    """The whole list takes half a minute and is left to CI's own call."""
    done = run_check("--arch", "90", "--only", "576x576")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("gemm 576x576 bf16") for line in lines)
    assert all("sm_90" in line and "registers" in line and "shared" in line for line in lines)


def test_what_does_not_compile_is_named(tmp_path: Path) -> None:
    """A check that cannot fail would say nothing: a size that is no power of two, a wrong name."""
    script = tmp_path / "broken.py"
    script.write_text(BROKEN, encoding="utf-8")
    done = run_python(str(script))
    assert done.stdout.splitlines()[-1] == "['odd sm_90', 'unknown sm_90']", done.stdout
    assert "WIDTH" in done.stdout


def test_a_name_that_no_kernel_has_is_an_error() -> None:
    """A misspelt name must not pass as "all of none compiled"."""
    done = run_check("--only", "no such kernel")
    assert done.returncode == 2
    assert "no kernel's name contains" in done.stderr
