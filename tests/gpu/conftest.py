"""Fixtures of the tests on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _nothing_under_way() -> Iterator[None]:
    """A fault of the device shows in the test that made it, not in the next one."""
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
