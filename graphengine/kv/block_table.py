"""BlockTable: which physical blocks hold one request's KV, in order.

Owns the list of block ids. Knows nothing of who else refers to a block or of block sizes: counts
and lifetimes are the pool's, sizes the manager's.
"""

from __future__ import annotations


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
