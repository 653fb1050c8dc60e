"""Auditor: recounts who holds which block and compares it with what the bookkeeping says.

Owns no state and repairs nothing. Works from the requests' own tables and tokens, so that a slip in
counts, free lists, digests or lengths shows at the step that made it rather than as a wrong token
later. Digests are computed afresh. Meant for tests and debugging: its cost grows with all tokens.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from graphengine.kv.block_pool import NULL_BLOCK, BlockPool
from graphengine.kv.manager import KVManager
from graphengine.request import Request, RequestStatus


class AuditError(AssertionError):
    """The KV bookkeeping contradicts itself; the message names block or request."""


def audit(kv: KVManager, requests: Iterable[Request]) -> None:
    """Checks pool, tables, prefix cache and lengths against each other.

    Args:
        kv: the manager under audit.
        requests: every request that may hold blocks; waiting and finished ones may be passed too
            and must hold none.

    Raises:
        AuditError: at the first contradiction.
    """
    everyone = list(requests)
    _audit_pool(kv.pool)
    for request in everyone:
        _audit_request(kv, request)
    _audit_rows(everyone)
    _audit_owners(kv, everyone)
    _audit_digests(kv, everyone)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AuditError(message)


def _audit_pool(pool: BlockPool) -> None:
    """Every block is exactly one of null, clean, cached and held."""
    clean, cached = pool.free_block_ids()
    held = [block for block in range(pool.num_blocks) if pool.ref_count(block) > 0]
    places = Counter([NULL_BLOCK, *clean, *cached, *held])
    for block in range(pool.num_blocks):
        _require(
            places[block] == 1,
            f"block {block} is counted {places[block]} times among null, clean, cached and held",
        )
    _require(sum(places.values()) == pool.num_blocks, f"unknown blocks among {sorted(places)}")

    published = pool.published()
    for block in cached:
        _require(block in published, f"block {block} is on the cached list without a digest")
    for block in [NULL_BLOCK, *clean]:
        _require(block not in published, f"block {block} is null or clean and has a digest")
    for block, digest in published.items():
        found = pool.find(digest)
        _require(found == block, f"digest of block {block} is indexed under block {found}")


def _audit_request(kv: KVManager, request: Request) -> None:
    """Lengths agree with the status, and the table with the lengths."""
    num_blocks = len(request.block_table)
    if request.status in (RequestStatus.WAITING, RequestStatus.FINISHED):
        _require(num_blocks == 0, f"{request} holds {num_blocks} blocks and does not run")
        _require(request.kv_len == 0, f"{request} has kv_len and does not run")
        _require(request.row is None, f"{request} holds a row and does not run")
        _require(request.num_reserved_rows == 0, f"{request} has rows reserved and does not run")
        return
    _require(request.row is not None, f"{request} runs without a row")
    _require(
        request.num_tokens < request.limit,
        f"{request} runs with its limit reached",
    )
    ready = request.kv_len == request.num_tokens - 1
    _require(
        ready
        if request.status is RequestStatus.DECODE
        else request.kv_len < request.num_tokens - 1,
        f"{request} has a kv_len that its status rules out",
    )
    rows = request.kv_len + request.num_reserved_rows
    _require(
        rows < request.limit,  # the last token emitted never enters the cache
        f"{request} has {request.num_reserved_rows} rows reserved, past its limit",
    )
    _require(
        num_blocks == kv.blocks_for(rows),
        f"{request} has {num_blocks} blocks for {rows} rows in use or reserved; "
        f"{kv.blocks_for(rows)} are right",
    )


def _audit_rows(requests: list[Request]) -> None:
    holders: dict[int, Request] = {}
    for request in requests:
        if request.row is not None:
            other = holders.setdefault(request.row, request)
            _require(other is request, f"{other} and {request} hold the same row")


def _audit_owners(kv: KVManager, requests: list[Request]) -> None:
    """Reference counts equal owners, and only finished, published blocks are shared."""
    owners: dict[int, list[tuple[Request, int]]] = defaultdict(list)
    for request in requests:
        for index, block in enumerate(request.block_table.block_ids):
            owners[block].append((request, index))
    for block in range(kv.pool.num_blocks):
        count, known = kv.pool.ref_count(block), owners.get(block, [])
        _require(
            count == len(known),
            f"block {block} has {count} references and {len(known)} owners: "
            f"{[request.request_id for request, _ in known]}",
        )
        for request, index in known:
            if index >= request.kv_len // kv.block_size:
                # The request will write here.
                _require(count == 1, f"block {block}, open in {request}, is shared")
                _require(
                    kv.pool.digest(block) is None, f"block {block}, open in {request}, is published"
                )
        if len(known) > 1:
            _require(kv.pool.digest(block) is not None, f"block {block} is shared, not published")
            indices = {index for _, index in known}
            _require(len(indices) == 1, f"block {block} is shared at several places, {indices}")


def _audit_digests(kv: KVManager, requests: list[Request]) -> None:
    """A published block's digest is that of its owner's tokens, all of them before it included."""
    if kv.prefix_cache is None:
        _require(not kv.pool.published(), "blocks are published with prefix caching off")
        return
    for request in requests:
        fresh: list[bytes] = []
        num_known = max(len(request.block_digests), request.kv_len // kv.block_size)
        kv.prefix_cache.extend_digests(fresh, request.token_ids, num_known)
        _require(
            request.block_digests == fresh[: len(request.block_digests)],
            f"{request} remembers a digest that is not that of its tokens",
        )
        for index, block in enumerate(request.block_table.block_ids):
            digest = kv.pool.digest(block)
            _require(
                digest is None or digest == fresh[index],
                f"block {block} is published under a digest that is not that of {request}'s "
                f"tokens at block {index}",
            )
