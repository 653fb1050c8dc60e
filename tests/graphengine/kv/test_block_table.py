"""BlockTable: positions to slots."""

import numpy as np
import pytest

from graphengine.kv.block_table import BlockTable


def test_slots_cross_blocks_in_table_order() -> None:
    """Guards against rows being written by logical instead of physical block."""
    table = BlockTable()
    table.append([5, 2])
    slots = table.slots(2, 6, 4)
    assert slots.dtype == np.int64
    assert slots.tolist() == [22, 23, 8, 9]
    assert table.slots(3, 3, 4).tolist() == []


@pytest.mark.parametrize(("start", "stop"), [(0, 9), (-1, 2), (5, 4)])
def test_positions_outside_the_table_are_refused(start: int, stop: int) -> None:
    """Guards against a draft row indexing past the table (a negative index would wrap)."""
    table = BlockTable()
    table.append([5, 2])
    with pytest.raises(AssertionError, match="outside a table of 2 blocks of 4"):
        table.slots(start, stop, 4)


def test_truncate_returns_what_it_cuts() -> None:
    """Guards against blocks dropped from a table without being freed."""
    table = BlockTable()
    table.append([5, 2, 7])
    assert table.truncate(1) == [2, 7]
    assert table.block_ids == [5]
    assert table.truncate(4) == []
    assert table.capacity(4) == 4
