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
        _audit_drafts(kv, request)
    _audit_rows(everyone)
    _audit_owners(kv, everyone)
    _audit_digests(kv, everyone)


def _audit_pool(pool: BlockPool) -> None:
    """Every block is exactly one of null, clean, cached and held."""
    clean, cached = pool.free_block_ids()
    held = [block for block in range(pool.num_blocks) if pool.ref_count(block) > 0]
    places = Counter([NULL_BLOCK, *clean, *cached, *held])
    for block in range(pool.num_blocks):
        if places[block] != 1:
            raise AuditError(
                f"block {block} is counted {places[block]} times among null, clean, cached and held"
            )
    if len(places) != pool.num_blocks:
        raise AuditError(f"blocks that the pool does not have are free: {sorted(places)}")

    published = pool.published()
    for block in cached:
        if block not in published:
            raise AuditError(f"block {block} is on the cached list without a digest")
    for block in [NULL_BLOCK, *clean]:
        if block in published:
            raise AuditError(f"block {block} is null or clean and has a digest")
    for block, digest in published.items():
        if pool.find(digest) != block:
            raise AuditError(f"digest of block {block} is indexed under {pool.find(digest)}")


def _audit_drafts(kv: KVManager, request: Request) -> None:
    """Draft KV reaches no further than the target's, and its full blocks are known to have it."""
    if request.draft_kv_len > request.kv_len:
        raise AuditError(f"{request} has {request.draft_kv_len} rows of draft KV, more than kv_len")
    for block in request.block_table.block_ids[: request.draft_kv_len // kv.block_size]:
        if not kv.pool.is_drafted(block):
            raise AuditError(f"block {block} of {request} is not known to hold draft KV")


def _audit_request(kv: KVManager, request: Request) -> None:
    problem = (
        _running_problem(kv, request)
        if request.status in (RequestStatus.PREFILL, RequestStatus.DECODE)
        else _idle_problem(request)
    )
    if problem is not None:
        raise AuditError(f"{request} {problem}")


def _idle_problem(request: Request) -> str | None:
    """What a waiting or finished request holds that it must not."""
    if len(request.block_table) > 0:
        return f"holds {len(request.block_table)} blocks and does not run"
    held = (request.kv_len, request.draft_kv_len, request.num_reserved_rows)
    if any(held) or request.row is not None:
        return "has kv_len, draft_kv_len, reserved rows or a state row and does not run"
    return None


def _running_problem(kv: KVManager, request: Request) -> str | None:
    """Where a running request's lengths, status and table disagree."""
    if request.row is None:
        return "runs without a row"
    if request.num_tokens >= request.limit:
        return "runs with its limit reached"
    missing = request.num_tokens - 1 - request.kv_len
    if missing != 0 if request.status is RequestStatus.DECODE else missing <= 0:
        return "has a kv_len that its status rules out"
    rows = request.kv_len + request.num_reserved_rows
    if rows >= request.limit:  # the last token emitted never enters the cache
        return f"has {request.num_reserved_rows} rows reserved, past its limit"
    num_blocks, right = len(request.block_table), kv.blocks_for(rows)
    if num_blocks != right:
        return f"has {num_blocks} blocks for {rows} rows in use or reserved; {right} are right"
    return None


def _audit_rows(requests: list[Request]) -> None:
    holders: dict[int, Request] = {}
    for request in requests:
        if request.row is None:
            continue
        other = holders.setdefault(request.row, request)
        if other is not request:
            raise AuditError(f"{other} and {request} hold the same row")


def _audit_owners(kv: KVManager, requests: list[Request]) -> None:
    """Reference counts equal owners, and only finished, published blocks are shared."""
    owners: dict[int, list[tuple[Request, int]]] = defaultdict(list)
    for request in requests:
        for index, block in enumerate(request.block_table.block_ids):
            owners[block].append((request, index))
    for block in range(kv.pool.num_blocks):
        count, known = kv.pool.ref_count(block), owners.get(block, [])
        if count != len(known):
            names = [request.request_id for request, _ in known]
            raise AuditError(
                f"block {block} has {count} references and {len(known)} owners: {names}"
            )
        published = kv.pool.digest(block) is not None
        for request, index in known:
            is_open = index >= request.kv_len // kv.block_size  # the request will write here
            if is_open and (count > 1 or published):
                raise AuditError(f"block {block}, open in {request}, is shared or published")
        if count > 1 and not published:
            raise AuditError(f"block {block} is shared and not published")
        if len({index for _, index in known}) > 1:
            raise AuditError(f"block {block} is shared at several places: {known}")


def _audit_digests(kv: KVManager, requests: list[Request]) -> None:
    """A published block's digest is that of its owner's tokens, all of them before it included."""
    if kv.prefix_cache is None:
        if kv.pool.published():
            raise AuditError("blocks are published with prefix caching off")
        return
    for request in requests:
        if request.is_finished:
            continue
        fresh: list[bytes] = []
        num_rows = max(len(request.block_digests) * kv.block_size, request.kv_len)
        num_known = kv.prefix_cache.num_full_blocks(num_rows, request.num_tokens)
        kv.prefix_cache.extend_digests(fresh, request.token_ids, num_known, request.cache_salt)
        if request.block_digests != fresh[: len(request.block_digests)]:
            raise AuditError(f"{request} remembers a digest that is not that of its tokens")
        for block, digest in zip(request.block_table.block_ids, fresh, strict=False):
            if kv.pool.digest(block) not in (None, digest):
                raise AuditError(
                    f"block {block} is published under a digest that is not that of the tokens "
                    f"of {request}"
                )
