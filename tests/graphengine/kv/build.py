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
        assert kv.ensure_slot(request, request.num_prefill_tokens)
        kv.advance_prefill(request, request.num_prefill_tokens)
    request.status = RequestStatus.DECODE
    return request
