"""The library under test: built for this CPU, and built with the portable 4-lane vectors."""

import platform

import pytest

from graphengine.kernels.build import build
from graphengine.kernels.library import bind, load
from tests.graphengine.kernels.calls import Kernels

X86 = platform.machine() == "x86_64"
PORTABLE = ("-mno-avx", "-O2") if X86 else ()
FLOATS = ("-mno-avx512bf16",) if X86 else ()


@pytest.fixture(scope="session", params=["native", "portable"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    library = load() if request.param == "native" else bind(build(PORTABLE).library)
    if request.param == "portable":
        assert library.vector_lanes() == 4, "the portable build must not use wide vectors"
    return Kernels(library)


@pytest.fixture(scope="session")
def native() -> Kernels:
    return Kernels(load())
