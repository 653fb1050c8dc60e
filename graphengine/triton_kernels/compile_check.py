"""`python -m graphengine.triton_kernels.compile_check`: every Triton kernel down to machine code.

Owns the list of modules whose `COMPILED` is read. Needs triton and no GPU: the compiler is told the
target. What the interpreter lets pass (types that do not match, shapes that are no powers of two,
too much shared memory) is found here.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import redirect_stdout

from graphengine.triton_kernels.specs import KernelSpec

MODULES: tuple[str, ...] = (
    "attention",
    "choose",
    "gemm",
    "logprobs",
    "process",
    "request_rows",
    "rope",
    "rows",
    "sample",
    "search",
    "verify",
    "window",
)
ARCHS = (80, 90, 100)
POINTER_ALIGNMENT = 16  # bytes; of whatever torch allocates
# What a block may have, by the CUDA programming guide's table of compute capabilities.
MAX_SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}


def load_specs(modules: Iterable[str] = MODULES) -> list[KernelSpec]:
    """The kernels of these modules of the package."""
    return [
        spec
        for module in modules
        for spec in importlib.import_module(f"{__package__}.{module}").COMPILED
    ]


def compile_spec(spec: KernelSpec, arch: int) -> str:
    """Compile for one architecture, sm_`arch`; what it takes, in words.

    Raises:
        ValueError: the specification does not fit the kernel's arguments, or it takes more shared
            memory than a block of that architecture can have.
        RuntimeError: it does not compile; so are the compiler's own errors, or made into one.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = spec.kernel.arg_names
    given = [*spec.signature, *spec.constants]
    if sorted(given) != sorted(names):
        wrong = sorted(set(given) ^ set(names)) or "an argument given twice"
        raise ValueError(f"signature and constants do not match the kernel: {wrong}")
    signature = {name: spec.signature.get(name, "constexpr") for name in names}
    aligned = [["tt.divisibility", POINTER_ALIGNMENT]]
    attrs = {(i,): aligned for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(spec.kernel, signature, dict(spec.constants), attrs)
    log = io.StringIO()
    with redirect_stdout(log):  # where triton prints what the assembler says
        compiled = triton.compile(
            source, target=GPUTarget("cuda", arch, 32), options=dict(spec.options)
        )
    shared = compiled.metadata.shared
    if shared > MAX_SHARED_BYTES.get(arch, shared):
        raise ValueError(f"{shared} bytes of shared memory, over {MAX_SHARED_BYTES[arch]}")
    return f"shared {shared:6}  {_registers(log.getvalue())}"


def compile_all(specs: list[KernelSpec], archs: list[int]) -> list[str]:
    """Compile all, print a line each, and return the names of what failed."""
    from triton.errors import TritonError

    failed = []
    for spec in specs:
        for arch in archs:
            name = f"{spec.name} sm_{arch}"
            started = time.perf_counter()
            try:
                told = compile_spec(spec, arch)
            except (TritonError, RuntimeError, ValueError, TypeError, AssertionError) as error:
                failed.append(name)
                told = f"FAILED {type(error).__name__}: {error}"
            print(f"{name:44} {told}  {time.perf_counter() - started:.1f} s", flush=True)
    return failed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="compile every Triton kernel without a GPU")
    parser.add_argument("--arch", type=_archs, default=list(ARCHS), help="such as 80,90")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    options = parser.parse_args(arguments)
    refusal = _refusal()
    if refusal is not None:
        print(f"compile_check: {refusal}", file=sys.stderr)
        return 2
    specs = [spec for spec in load_specs() if options.only in spec.name]
    if not specs:
        print(f"compile_check: no kernel's name contains {options.only!r}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # an earlier result proves nothing
        os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"
        failed = compile_all(specs, options.arch)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _archs(text: str) -> list[int]:
    return [int(arch) for arch in text.split(",")]


def _refusal() -> str | None:
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        return "TRITON_INTERPRET is set: interpreted kernels cannot be compiled; unset it"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None


def _registers(log: str) -> str:
    used, spilled = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes spill st", log)
    if used is None or spilled is None:
        return "registers not told"
    return f"registers {used[1]:>3}  spilled {spilled[1]} B"


if __name__ == "__main__":
    sys.exit(main())
