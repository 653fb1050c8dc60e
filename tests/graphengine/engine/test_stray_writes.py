"""Writes beside a step's own slots, planted: the harness must find each (cases 7, 10)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphengine.kv.auditor import AuditError
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Setup

K, SIZE = 3, 4
STORAGES: dict[str, Callable[[Any], torch.Tensor]] = {  # of an engine
    "layer 0": lambda engine: engine.runner.decoder.kv_caches[0],
    "layer 1": lambda engine: engine.runner.decoder.kv_caches[1],
    "draft layer 0": lambda engine: engine.proposer.runtime.kv_caches[0],
    "hidden states": lambda engine: engine.runner.hidden_states.storage,
}


def touch(storage: torch.Tensor, slot: int) -> None:
    """Flip one bit of a slot."""
    numbers = storage[slot] if storage.ndim == 2 else storage[slot // SIZE, 1, slot % SIZE, 0]
    numbers.view(torch.int32)[3] ^= 1


@pytest.mark.parametrize("where", ["last block", "another request", "before", "behind", "null"])
@pytest.mark.parametrize("name", STORAGES)
def test_a_stray_write_is_found(name: str, where: str, checkpoints: Checkpoints) -> None:
    """Pads that write to the last block or to live rows, rows off by one; block 0 is free to all.

    A slot just before a request's own rows, and one just behind its last draft's.
    """
    setup = Setup(k=K, max_num_seqs=2, block_size=SIZE, num_blocks=20, prefix=False)
    records = {str(index): [5 * index + 1] * 40 for index in range(2)}
    harness = Harness(setup.start(checkpoints.get(), method="mock-eagle", records=records))
    engine, storage = harness.engine, STORAGES[name](harness.engine)
    for index in range(2):
        harness.add(str(index), records[str(index)][: 6 + index])
    harness.step()
    request = harness.requests["0"]

    def slot() -> int:
        last, first = 20 * SIZE - 1, request.kv_len - 4
        at = first if where == "before" else request.kv_len + K + 1
        if where in ("last block", "null"):
            return last if where == "last block" else 1
        if where == "another request":
            return harness.requests["1"].block_table.block_ids[0] * SIZE
        table = request.block_table.block_ids
        return table[at // SIZE] * SIZE + at % SIZE if at // SIZE < len(table) else last

    verify = engine.runner.verify

    def verify_and_stray(*given: Any) -> Any:
        frame = verify(*given)
        touch(storage, slot())
        return frame

    engine.runner.verify = verify_and_stray  # type: ignore[method-assign]
    if where == "null":
        harness.step()
        return
    with pytest.raises(AuditError, match=rf"{name}: slots \[\d+\] were written"):
        harness.step()
