"""BlockTable: which physical blocks hold one request's KV, in order.

Owns the list of block ids. Knows nothing of who else refers to a block or of block sizes: counts
and lifetimes are the pool's, sizes the manager's.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class BlockTable:
    """Logical block index -> physical block id, for one request."""

    __slots__ = ("block_ids",)

    def __init__(self) -> None:
        self.block_ids: list[int] = []

    def __len__(self) -> int:
        return len(self.block_ids)

    def capacity(self, block_size: int) -> int:
        """Number of token positions that the table has room for."""
        return len(self.block_ids) * block_size

    def append(self, block_ids: list[int]) -> None:
        self.block_ids.extend(block_ids)

    def truncate(self, num_blocks: int) -> list[int]:
        """Keeps the first `num_blocks` and returns the ids cut off, in table order."""
        dropped = self.block_ids[num_blocks:]
        del self.block_ids[num_blocks:]
        return dropped

    def slots(self, start: int, stop: int, block_size: int) -> NDArray[np.int64]:
        """Physical slots of the token positions [start, stop), int64 `[stop - start]`."""
        assert 0 <= start <= stop <= self.capacity(block_size), (
            f"positions [{start}, {stop}) are outside a table of {len(self.block_ids)} blocks "
            f"of {block_size}"
        )
        positions = np.arange(start, stop, dtype=np.int64)
        blocks = np.asarray(self.block_ids, dtype=np.int64)
        return blocks[positions // block_size] * block_size + positions % block_size
