"""compile_check: every kernel module is in its list, and it says what does not compile."""

import os
import pkgutil
import subprocess
import sys
from importlib import import_module

import pytest

import graphengine.triton_kernels
from graphengine.triton_kernels import compile_check

pytest.importorskip("triton")


def run_check(*arguments: str, interpret: bool = False) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, where kernels are compiled and not interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "graphengine.triton_kernels.compile_check", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


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
