"""Fixtures of the proposers' tests."""

import pytest

from tests.graphengine.engine.checkpoints import Checkpoints


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Tiny checkpoints by name, made once."""
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))
