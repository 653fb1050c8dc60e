"""FlashInfer's package over a double of its compiled module."""

import pytest

from tests.graphengine.attention.flashinfer_double import NativeDouble, install


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> NativeDouble:
    return install(monkeypatch)
