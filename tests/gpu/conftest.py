"""Fixtures of the tests on a GPU: one stream for engine and test, so that neither overtakes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from capture.cuda import CudaStream
from capture.stream import Stream
from graphengine import startup
from tests.graphengine.engine.checkpoints import Checkpoints


@pytest.fixture(autouse=True)
def _one_stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test writes into caches and reads of them is in order with the engine's steps."""
    if not torch.cuda.is_available():
        yield
        return
    shared = torch.cuda.Stream()
    make_stream = startup.make_stream

    def make(device: torch.device, async_steps: int) -> Stream:
        stream = make_stream(device, async_steps)
        if isinstance(stream, CudaStream):
            stream.stream = shared
        return stream

    monkeypatch.setattr(startup, "make_stream", make)
    with torch.cuda.stream(shared):
        yield
        shared.synchronize()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Tiny random checkpoints by name, made once."""
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))
