"""BlockTable: what is cut off a table comes back."""

from graphengine.kv.block_table import BlockTable


def test_truncate_returns_what_it_cuts() -> None:
    """Guards against blocks dropped from a table without being freed."""
    table = BlockTable()
    table.append([5, 2, 7])
    assert table.truncate(1) == [2, 7]
    assert table.block_ids == [5]
    assert table.truncate(4) == []
    assert table.capacity(4) == 4
