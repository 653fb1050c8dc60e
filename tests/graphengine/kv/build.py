"""Small KV managers, and requests brought to the point where they can decode."""

from graphengine.kv.manager import KVManager
from graphengine.request import Request, RequestStatus


def make_kv(num_blocks: int = 16, block_size: int = 4, caching: bool = True) -> KVManager:
    return KVManager(num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=caching)


def prefill(kv: KVManager, request: Request, row: int = 0) -> Request:
    """Brings a fresh request to the point where it can decode."""
    kv.match_prefix(request)
    request.row = row
    request.status = RequestStatus.PREFILL
    if request.num_prefill_tokens:
        assert kv.reserve_rows(request, request.num_prefill_tokens)
        kv.advance_prefill(request, request.num_prefill_tokens)
    request.status = RequestStatus.DECODE
    return request


def slots(kv: KVManager, request: Request, start: int, stop: int) -> list[int]:
    """Physical slots of positions [start, stop) of a request."""
    table, size = request.block_table, kv.block_size
    assert 0 <= start <= stop <= table.capacity(size), f"[{start}, {stop}) is not in the table"
    return [table.block_ids[p // size] * size + p % size for p in range(start, stop)]
