"""KVManager: gives requests room for KV rows and takes it back.

Owns the rules that tie tables, pool and prefix cache together: rows are reserved before a step and
kept or dropped after it. Never preempts: it says what fits, and the scheduler decides who yields.
Knows nothing of tensors; it deals in block ids and row counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

from graphengine.kv.block_pool import BlockPool
from graphengine.kv.block_table import BlockTable
from graphengine.kv.prefix_cache import PrefixCache
from graphengine.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class KVStats:
    """Blocks by state; `num_used + num_free + 1 == num_blocks`, the 1 being the null block."""

    num_blocks: int
    num_used: int
    num_free: int  # cached ones included
    num_cached: int


class KVManager:
    """Blocks for every request of one engine.

    Args:
        num_blocks: physical blocks, the null block included.
        block_size: tokens per block, >= 1.
        enable_prefix_caching: publish full blocks and look prompts up.
        lookahead: how many tokens behind its own a slot's draft KV depends on.

    Raises:
        ValueError: block_size < 1 or num_blocks < 2.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        lookahead: int = 0,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size={block_size}: expected an integer >= 1")
        self.block_size = block_size
        self._lookahead = lookahead
        self.pool = BlockPool(num_blocks)
        self.prefix_cache = self._make_cache() if enable_prefix_caching else None

    def _make_cache(self) -> PrefixCache:
        return PrefixCache(self.pool, self.block_size, self._lookahead)

    def blocks_for(self, num_rows: int) -> int:
        """Blocks that hold `num_rows` KV rows."""
        return -(-num_rows // self.block_size)

    def stats(self) -> KVStats:
        pool = self.pool
        return KVStats(
            num_blocks=pool.num_blocks,
            num_used=pool.num_used,
            num_free=pool.num_free,
            num_cached=pool.num_cached,
        )

    def find_prefix(self, request: Request) -> list[int]:
        """Cached blocks that the request could start from; takes no reference."""
        if self.prefix_cache is None or request.needs_whole_prompt:
            return []
        return self.prefix_cache.lookup(
            request.token_ids, request.block_digests, request.cache_salt
        )

    def match_prefix(self, request: Request) -> int:
        """Starts a request from the longest cached prefix; returns the tokens found.

        Afterwards `kv_len` is that number, at most `num_tokens - 1`, and `draft_kv_len` what of it
        holds draft KV.
        """
        assert len(request.block_table) == 0, (
            f"{request} holds KV already; a prefix is matched before anything is computed"
        )
        block_ids = self.find_prefix(request)
        self.pool.touch(block_ids)
        request.block_table.append(block_ids)
        request.kv_len = len(block_ids) * self.block_size
        drafted = takewhile(self.pool.is_drafted, block_ids)
        request.draft_kv_len = sum(1 for _ in drafted) * self.block_size
        return request.kv_len

    def reserve_rows(self, request: Request, num_rows: int) -> bool:
        """Reserves rows [kv_len, kv_len + num_rows), all of them or (False) none."""
        assert num_rows >= 1, f"{num_rows} rows asked for {request}"
        wanted = self.blocks_for(request.kv_len + num_rows) - len(request.block_table)
        if wanted > 0:
            block_ids = self.pool.allocate(wanted)
            if block_ids is None:
                return False
            request.block_table.append(block_ids)
        request.num_reserved_rows = num_rows
        return True

    def reserve_prefill(self, request: Request, num_rows: int) -> int:
        """Reserves as many of `num_rows` prefill rows as the pool has room for; may be 0."""
        assert 0 <= num_rows <= request.num_prefill_tokens, (
            f"{num_rows} prefill rows asked for {request}"
        )
        granted = self._grow(request, num_rows)
        request.num_reserved_rows = granted
        return granted

    def reserve_speculative(self, request: Request, draft_rows: int) -> int:
        """Reserves room for up to `draft_rows` drafts behind the row already ensured.

        Cut first so that the bonus token keeps its place under the limit, then to what the pool can
        give. Takes free blocks only, so nobody is preempted or evicted for a draft; clean blocks go
        first, and reclaiming a cached block that nobody holds is allowed (it costs at most a later
        recompute, and the block comes back clean when the draft is rejected).

        Returns:
            The number of drafts that the request may carry this step, in [0, draft_rows].
        """
        assert draft_rows >= 0, f"{draft_rows} draft rows asked for {request}"
        assert request.is_decode_ready, f"{request} cannot carry drafts: it is not decode-ready"
        assert request.num_reserved_rows > request.num_in_flight, (
            f"{request} has no row for its last token"
        )
        fit = min(draft_rows, request.max_draft_tokens)
        certain = request.num_in_flight + 1
        request.num_reserved_rows = self._grow(request, certain + fit)
        return request.num_reserved_rows - certain

    def advance_prefill(self, request: Request, num_tokens: int) -> None:
        """Records that the chunk [kv_len, kv_len + num_tokens) is in the cache."""
        assert 1 <= num_tokens <= request.num_reserved_rows, (
            f"{num_tokens} tokens prefilled with {request.num_reserved_rows} rows reserved: "
            f"{request}"
        )
        assert num_tokens <= request.num_prefill_tokens, (
            f"{num_tokens} tokens prefilled with {request.num_prefill_tokens} left: {request}"
        )
        self.keep_rows(request, num_tokens)

    def keep_rows(self, request: Request, num_rows: int) -> None:
        """Keeps the first `num_rows` reserved rows, drops the rest, publishes full blocks.

        The tokens of the kept rows must be in `token_ids` already. For callers in this package and
        `commit`: the checks are theirs.
        """
        # A block whose lookahead was not known before may be published only now.
        first = max(0, request.kv_len - self._lookahead) // self.block_size
        request.kv_len += num_rows
        self._publish(request, first)
        self.trim(request)

    def keep_draft_rows(self, request: Request, num_rows: int) -> None:
        """Records that the first `num_rows` slots hold draft KV, as far as the target's reaches.

        What lies behind `kv_len` was of drafts that are gone: one rollback serves both.
        """
        before, request.draft_kv_len = request.draft_kv_len, min(num_rows, request.kv_len)
        for index in range(before // self.block_size, request.draft_kv_len // self.block_size):
            self.pool.mark_drafted(request.block_table.block_ids[index])

    def trim(self, request: Request) -> None:
        """Drops all reservations but those of steps under way: frees the blocks wholly beyond."""
        num_blocks = self.blocks_for(request.kv_len + request.num_in_flight)
        if num_blocks < len(request.block_table):
            self.pool.free(request.block_table.truncate(num_blocks))
        request.num_reserved_rows = request.num_in_flight

    def release(self, request: Request) -> None:
        """Gives back every block. Published ones stay findable until they are reused."""
        self.pool.free(request.block_table.truncate(0))
        request.kv_len = request.draft_kv_len = 0
        request.num_reserved_rows = request.num_in_flight = 0

    def start_over(self, requests: Iterable[Request]) -> None:
        """Frees every block and forgets what is cached, whatever state the bookkeeping is in.

        Args:
            requests: all that may hold blocks; afterwards none does.
        """
        self.pool = BlockPool(self.pool.num_blocks)
        if self.prefix_cache is not None:
            self.prefix_cache = self._make_cache()
        for request in requests:
            request.block_table = BlockTable()
            request.kv_len = request.draft_kv_len = 0
            request.num_reserved_rows = request.num_in_flight = 0

    def _grow(self, request: Request, num_rows: int) -> int:
        """Extends the table towards `kv_len + num_rows`; returns the rows that have room."""
        wanted = self.blocks_for(request.kv_len + num_rows) - len(request.block_table)
        take = min(max(wanted, 0), self.pool.num_free)
        block_ids = self.pool.allocate(take)
        assert block_ids is not None, f"pool refused {take} blocks it said were free"
        request.block_table.append(block_ids)
        return min(num_rows, request.block_table.capacity(self.block_size) - request.kv_len)

    def _publish(self, request: Request, first: int) -> None:
        """Publishes the full blocks from index `first` on that `kv_len` now covers."""
        if self.prefix_cache is None:
            return
        num_full = self.prefix_cache.num_full_blocks(request.kv_len, request.num_tokens)
        self.prefix_cache.extend_digests(
            request.block_digests, request.token_ids, num_full, request.cache_salt
        )
        for index in range(first, num_full):
            block_id = request.block_table.block_ids[index]
            if self.pool.digest(block_id) is None:
                self.prefix_cache.publish(block_id, request.block_digests[index])
