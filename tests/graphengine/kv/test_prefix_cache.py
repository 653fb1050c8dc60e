"""PrefixCache: what a digest covers, and how far a hit may reach."""

import numpy as np
import pytest

from graphengine.kv.block_pool import BlockPool
from graphengine.kv.prefix_cache import PrefixCache

SIZE = 4


def publish_all(pool: BlockPool, cache: PrefixCache, tokens: list[int]) -> list[int]:
    """Publishes every full block of `tokens`, as a request would that computed them."""
    digests: list[bytes] = []
    cache.extend_digests(digests, tokens, len(tokens) // SIZE)
    blocks = pool.allocate(len(digests))
    assert blocks is not None
    for block, digest in zip(blocks, digests, strict=True):
        cache.publish(block, digest)
    return blocks


@pytest.mark.parametrize("length", range(1, 14))
def test_a_hit_leaves_the_last_token_out(length: int) -> None:
    """Guards against a whole prompt being a hit, with no row left to predict from (case 28)."""
    pool = BlockPool(16)
    cache = PrefixCache(pool, SIZE)
    tokens = list(range(16))
    blocks = publish_all(pool, cache, tokens)
    found = cache.lookup(tokens[:length], [])
    assert found == blocks[: (length - 1) // SIZE]
    assert len(found) * SIZE <= length - 1


def test_a_digest_covers_everything_before_its_block() -> None:
    """Guards against equal blocks behind different prefixes being taken for each other."""
    pool = BlockPool(16)
    cache = PrefixCache(pool, SIZE)
    publish_all(pool, cache, [1, 2, 3, 4, 5, 6, 7, 8])
    assert cache.lookup([9, 2, 3, 4, 5, 6, 7, 8, 0], []) == []
    digests: list[bytes] = []
    cache.extend_digests(digests, [1, 1, 1, 1] * 3, 3)
    assert len(set(digests)) == 3


def test_token_order_and_width_count() -> None:
    """Guards against a digest over ids whose bytes run into each other."""
    pool = BlockPool(16)
    cache = PrefixCache(pool, SIZE)
    publish_all(pool, cache, [1, 0, 0, 0])
    assert cache.lookup([256, 0, 0, 0, 7], []) == []
    assert cache.lookup([0, 1, 0, 0, 7], []) == []
    assert cache.lookup([1, 0, 0, 0, 7], []) != []


def test_the_salt_separates_whole_chains() -> None:
    """Guards against one user's prompt being found, and so betrayed by its speed, by another's."""
    pool = BlockPool(32)
    cache = PrefixCache(pool, SIZE)
    tokens = list(range(9))
    found = {}
    for salt in (None, "a", "b", "\ud800"):
        assert cache.lookup(tokens, [], salt) == []
        digests: list[bytes] = []
        cache.extend_digests(digests, tokens, 2, salt)
        blocks = pool.allocate(2)
        assert blocks is not None
        for block, digest in zip(blocks, digests, strict=True):
            cache.publish(block, digest)
        found[salt] = blocks
    for salt, blocks in found.items():
        assert cache.lookup(tokens, [], salt) == blocks


def test_no_salt_stands_for_tokens() -> None:
    """Guards against a salt that is chosen to look like the first block of somebody's prompt."""
    pool = BlockPool(16)
    cache = PrefixCache(pool, SIZE)
    head, tail = [65, 66, 67, 68], [1, 2, 3, 4]
    publish_all(pool, cache, head + tail)
    salt = np.array(head, dtype="<i4").tobytes().decode()
    assert cache.lookup([*tail, 5], [], salt) == []


def test_a_gap_ends_the_chain() -> None:
    """Guards against blocks behind an evicted one being used at the wrong place."""
    pool = BlockPool(4)
    cache = PrefixCache(pool, SIZE)
    tokens = list(range(12))
    head, middle, tail = publish_all(pool, cache, tokens)
    pool.free([middle])
    assert pool.allocate(1) == [middle]
    assert cache.lookup([*tokens, 0], []) == [head]
    assert pool.digest(tail) is not None


def test_digests_are_extended_in_place_and_equal_to_fresh_ones() -> None:
    """Guards against an incremental digest that differs from that of the whole."""
    cache = PrefixCache(BlockPool(2), SIZE)
    tokens = list(range(40))
    grown: list[bytes] = []
    for num_blocks in range(11):
        cache.extend_digests(grown, tokens, num_blocks)
        assert len(grown) == num_blocks
    fresh: list[bytes] = []
    cache.extend_digests(fresh, tokens, 10)
    assert grown == fresh
    with pytest.raises(AssertionError, match="11 full blocks of 4 asked of 40 tokens"):
        cache.extend_digests(grown, tokens, 11)
