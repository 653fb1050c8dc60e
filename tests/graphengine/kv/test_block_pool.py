"""BlockPool: counts, the free order, and refusals that change nothing."""

from typing import Any

import pytest

from graphengine.kv.block_pool import NULL_BLOCK, BlockPool


def take(pool: BlockPool, num_blocks: int) -> list[int]:
    block_ids = pool.allocate(num_blocks)
    assert block_ids is not None
    return block_ids


def snapshot(pool: BlockPool) -> Any:
    counts = [pool.ref_count(block) for block in range(pool.num_blocks)]
    return counts, pool.free_block_ids(), pool.published()


def test_null_block_is_never_handed_out() -> None:
    """Guards against a request owning the block that pad writes land in."""
    pool = BlockPool(5)
    assert sorted(take(pool, 4)) == [1, 2, 3, 4]
    assert pool.allocate(1) is None
    assert pool.num_used == 4
    assert pool.num_free == 0


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_a_pool_without_a_usable_block_is_refused(num_blocks: int) -> None:
    """Guards against an engine that starts and can serve nothing."""
    with pytest.raises(ValueError, match=f"num_blocks = {num_blocks}"):
        BlockPool(num_blocks)


def test_allocation_is_all_or_nothing() -> None:
    """Guards against the blocks of a half-served allocation being lost."""
    pool = BlockPool(4)
    before = snapshot(pool)
    assert pool.allocate(4) is None
    assert snapshot(pool) == before
    assert take(pool, 0) == []


def test_clean_blocks_go_before_cached_and_the_oldest_cached_first() -> None:
    """Guards against a reusable prefix being dropped while unused memory is left."""
    pool = BlockPool(6)
    a, b, c = take(pool, 3)
    pool.publish(a, b"a")
    pool.publish(b, b"b")
    pool.free([b])
    pool.free([a])
    pool.free([c])
    assert pool.num_cached == 2
    clean = {c, 4, 5}
    assert set(take(pool, 3)) == clean
    assert pool.find(b"a") == a
    assert take(pool, 1) == [b]  # freed before a
    assert pool.find(b"b") is None
    assert pool.digest(b) is None
    assert take(pool, 1) == [a]
    assert pool.published() == {}


def test_the_tail_of_a_freed_chain_is_reused_before_its_head() -> None:
    """Guards against eviction from the head, which makes the whole chain unfindable."""
    pool = BlockPool(4)
    chain = take(pool, 3)
    for block, digest in zip(chain, (b"0", b"1", b"2"), strict=True):
        pool.publish(block, digest)
    pool.free(chain)
    assert take(pool, 1) == [chain[-1]]
    assert pool.find(b"0") == chain[0]
    assert pool.find(b"1") == chain[1]


def test_touch_revives_a_cached_block_and_makes_it_recent() -> None:
    """Guards against a block being handed out while a new reader relies on it."""
    pool = BlockPool(3)
    a, b = take(pool, 2)
    pool.publish(a, b"a")
    pool.publish(b, b"b")
    pool.free([a])
    pool.free([b])
    pool.touch([a])
    assert pool.ref_count(a) == 1
    assert pool.num_free == 1
    pool.touch([a])
    pool.free([a])
    assert pool.ref_count(a) == 1
    pool.free([a])
    assert take(pool, 1) == [b]  # a was used last


def test_the_first_publisher_wins() -> None:
    """Guards against two blocks under one digest, of which the index would forget one."""
    pool = BlockPool(4)
    a, b = take(pool, 2)
    assert pool.publish(a, b"x")
    assert not pool.publish(b, b"x")
    assert pool.find(b"x") == a
    pool.free([b])
    assert pool.num_cached == 0


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([NULL_BLOCK], "null block"),
        ([1, NULL_BLOCK], "null block"),
        ([3], "freed 1 times with 0 references"),
        ([1, 1], "freed 2 times with 1 references"),
        ([99], "block 99 is not one of"),
        ([1, -1], "block -1 is not one of"),
    ],
)
def test_a_bad_free_changes_nothing(blocks: list[int], message: str) -> None:
    """Guards against a double free handing one block to two requests."""
    pool = BlockPool(4)
    assert take(pool, 2) == [1, 2]
    before = snapshot(pool)
    with pytest.raises(AssertionError, match=message):
        pool.free(blocks)
    assert snapshot(pool) == before


def test_a_bad_touch_or_publish_changes_nothing() -> None:
    """Guards against contents being shared that nobody vouches for."""
    pool = BlockPool(5)
    a, b = take(pool, 2)
    pool.publish(a, b"a")
    before = snapshot(pool)
    with pytest.raises(AssertionError, match="not published"):
        pool.touch([a, b])
    with pytest.raises(AssertionError, match="already published"):
        pool.publish(a, b"other")
    with pytest.raises(AssertionError, match="free block 4"):
        pool.publish(4, b"free")
    with pytest.raises(AssertionError, match="cannot be published"):
        pool.publish(NULL_BLOCK, b"null")
    with pytest.raises(AssertionError, match="cannot allocate -1"):
        pool.allocate(-1)
    assert snapshot(pool) == before


def test_unpublish_free_forgets_only_what_nobody_holds() -> None:
    """A reset of the prefix cache must not take blocks from running requests."""
    pool = BlockPool(4)
    held, free = pool.allocate(2) or []
    pool.publish(held, b"held")
    pool.publish(free, b"free")
    pool.free([free])
    assert pool.unpublish_free() == 1
    assert pool.find(b"held") == held
    assert pool.find(b"free") is None
    assert (pool.num_free, pool.num_cached) == (2, 0)
    assert sorted(pool.allocate(2) or []) == sorted({1, 2, 3} - {held})
