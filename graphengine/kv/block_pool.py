"""BlockPool: who holds each physical KV block, and which free block is handed out next.

Owns reference counts, the free order and the published digest of each block. Knows nothing of
tokens, requests or tensors: a digest is an opaque key that makes a free block findable until it
is reused. Block 0 is the null block: pad writes land there and it is never handed out.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

NULL_BLOCK = 0


class BlockPool:
    """Fixed set of blocks [0, num_blocks) with block 0 reserved.

    Free blocks are handed out clean ones first (never published, last freed first), then published
    ones, least recently used first; a published block loses its digest when it is handed out.

    Args:
        num_blocks: total number of blocks, the null block included; >= 2.

    Raises:
        ValueError: fewer than 2 blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks = {num_blocks}: at least 2 are needed, since block 0 is reserved"
            )
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        # A stack, so that block 1 goes out first and a freed table comes back in its own order.
        self._clean = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # free and published, oldest first
        self._digest_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._drafted: set[int] = set()

    @property
    def num_usable(self) -> int:
        """Blocks that can ever be handed out."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out now, cached ones included."""
        return len(self._clean) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks whose contents can still be found by their digest."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that somebody refers to, the null block not counted."""
        return self.num_usable - self.num_free

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def digest(self, block_id: int) -> bytes | None:
        """Digest under which the block is published, if it is."""
        return self._digest_of.get(block_id)

    def find(self, digest: bytes) -> int | None:
        """Block published under `digest`, held or free."""
        return self._block_of.get(digest)

    def mark_drafted(self, block_id: int) -> None:
        """Records that all slots of a held block hold valid draft KV too, until it is handed out
        anew.
        """
        assert self._ref_counts[block_id] > 0, f"free block {block_id} cannot get draft KV"
        self._drafted.add(block_id)

    def is_drafted(self, block_id: int) -> bool:
        """Whether all slots of the block hold valid draft KV."""
        return block_id in self._drafted

    def free_block_ids(self) -> tuple[list[int], list[int]]:
        """(clean, cached) free blocks, for the auditor."""
        return list(self._clean), list(self._cached)

    def published(self) -> dict[int, bytes]:
        """Block -> digest of every published block, a copy."""
        return dict(self._digest_of)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Hands out `num_blocks` blocks with one reference each, or None and changes nothing."""
        assert num_blocks >= 0, f"cannot allocate {num_blocks} blocks"
        if num_blocks > self.num_free:
            return None
        block_ids: list[int] = []
        for _ in range(num_blocks):
            if self._clean:
                block_id = self._clean.pop()
            else:
                block_id, _unused = self._cached.popitem(last=False)
                del self._block_of[self._digest_of.pop(block_id)]
            self._ref_counts[block_id] = 1
            self._drafted.discard(block_id)
            block_ids.append(block_id)
        return block_ids

    def touch(self, block_ids: Sequence[int]) -> None:
        """Adds one reference to each published block, taking it off the free list if need be."""
        for block_id in block_ids:
            assert block_id in self._digest_of, f"block {block_id} is not published"
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._cached[block_id]
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Drops one reference per entry, last entry first.

        In that order the tail of a published chain is reused before its head, which keeps the rest
        of the chain findable.
        """
        for block_id, count in Counter(block_ids).items():
            assert block_id != NULL_BLOCK, "the null block is never freed"
            assert 0 < block_id < self.num_blocks, (
                f"block {block_id} is not one of [1, {self.num_blocks})"
            )
            assert count <= self._ref_counts[block_id], (
                f"block {block_id} freed {count} times with {self._ref_counts[block_id]} references"
            )
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] > 0:
                continue
            if block_id in self._digest_of:
                self._cached[block_id] = None
            else:
                self._clean.append(block_id)

    def publish(self, block_id: int, digest: bytes) -> bool:
        """Makes a held block findable; False where another block has the digest already."""
        assert 0 < block_id < self.num_blocks, f"block {block_id} cannot be published"
        assert self._ref_counts[block_id] > 0, f"free block {block_id} cannot be published"
        assert block_id not in self._digest_of, f"block {block_id} is already published"
        if digest in self._block_of:
            return False
        self._digest_of[block_id] = digest
        self._block_of[digest] = block_id
        return True

    def unpublish_free(self) -> int:
        """Forgets the contents of every free published block; returns how many there were."""
        count = len(self._cached)
        for block_id in self._cached:
            del self._block_of[self._digest_of.pop(block_id)]
        self._clean.extend(reversed(self._cached))
        self._cached.clear()
        return count
