"""Fixtures of the engine tests."""

import pytest

from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.setups import Compile


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Tiny checkpoints by name, made once."""
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def compile_mode(request: pytest.FixtureRequest) -> Compile:
    """`native`, what engines run by default; `with_torch_ops` gives a test the other one too."""
    mode: Compile = getattr(request, "param", "native")
    return mode
