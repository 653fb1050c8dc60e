"""KVManager: reserving rows, keeping some of them, and giving the rest back."""

import pytest

from graphengine.kv.auditor import audit
from graphengine.request import RequestStatus
from tests.graphengine.kv.build import make_kv, prefill, slots
from tests.graphengine.scheduler.simulation import make_request


def test_bad_sizes_are_refused() -> None:
    """Guards against a division by zero at the first request."""
    with pytest.raises(ValueError, match="block_size=0"):
        make_kv(block_size=0)


@pytest.mark.parametrize("length", range(1, 10))
def test_lookahead_slots_exist_for_every_residue(length: int) -> None:
    """Guards against drafts written past the table at a block edge (case 7)."""
    kv = make_kv()
    request = prefill(kv, make_request("a", range(length), 30))
    assert kv.reserve_rows(request, 1)
    assert kv.reserve_speculative(request, 5) == 5
    assert request.block_table.capacity(4) >= request.kv_len + 1 + 5
    written = slots(kv, request, request.kv_len, request.kv_len + 6)
    assert len(set(written)) == 6
    assert min(written) >= kv.block_size  # none in the null block
    audit(kv, [request])


def test_drafts_are_truncated_to_the_pool_and_never_fail() -> None:
    """Guards against an exhausted pool evicting somebody, or granting rows it lacks."""
    kv = make_kv(num_blocks=5)
    a = prefill(kv, make_request("a", range(5), 20), row=0)
    b = prefill(kv, make_request("b", range(50, 52), 20), row=1)
    assert kv.reserve_rows(a, 1)
    assert kv.reserve_rows(b, 1)
    held = list(a.block_table.block_ids)
    assert kv.reserve_speculative(b, 9) == 6  # two slots left in its block, four in the last one
    assert kv.reserve_speculative(a, 9) == 3  # only what its own table still holds
    assert a.block_table.block_ids == held
    assert kv.pool.num_free == 0
    assert not kv.reserve_rows(a, 6)
    audit(kv, [a, b])


def test_drafts_leave_the_bonus_its_place_under_the_limit() -> None:
    """Guards against rows past max_tokens or max_model_len (cases 26, 27)."""
    kv = make_kv()
    for max_tokens, fit in ((1, 0), (2, 1), (5, 4), (6, 5), (7, 5)):
        request = prefill(kv, make_request("a", range(3), max_tokens))
        assert kv.reserve_rows(request, 1)
        assert kv.reserve_speculative(request, 5) == fit
        kv.release(request)


def test_drafts_reclaim_clean_blocks_before_cached_ones() -> None:
    """Guards against a reusable prefix being thrown away for a draft while memory is unused."""
    kv = make_kv(num_blocks=4)
    cached = prefill(kv, make_request("a", range(5), 4))
    kv.release(cached)
    assert kv.stats().num_cached == 1
    request = prefill(kv, make_request("b", [90], 20))
    assert kv.reserve_rows(request, 1)
    assert kv.reserve_speculative(request, 7) == 7
    assert kv.stats().num_cached == 1
    assert kv.reserve_speculative(request, 11) == 11  # an unreferenced cached block may go
    assert kv.stats().num_cached == 0


def test_dropped_rows_give_their_blocks_back() -> None:
    """Guards against blocks of rejected drafts staying with the request (case 8)."""
    kv = make_kv()
    request = prefill(kv, make_request("a", range(6), 30))
    assert kv.reserve_rows(request, 1)
    kv.reserve_speculative(request, 9)
    assert len(request.block_table) == 4
    kv.trim(request)
    assert len(request.block_table) == 2
    assert request.num_reserved_rows == 0
    kv.release(request)
    assert kv.stats().num_used == 0
    assert kv.stats().num_free == 15


def test_only_full_blocks_that_kv_covers_are_published() -> None:
    """Guards against a prefix hit on rows that were reserved and not computed."""
    kv = make_kv()
    request = make_request("a", range(12), 4)
    kv.match_prefix(request)
    request.row, request.status = 0, RequestStatus.PREFILL
    assert kv.reserve_prefill(request, 11) == 11
    kv.advance_prefill(request, 7)
    assert len(kv.pool.published()) == 1
    assert kv.reserve_prefill(request, 4) == 4
    kv.advance_prefill(request, 4)
    assert len(kv.pool.published()) == 2  # the third block lacks the last token's row
    assert request.is_decode_ready


def test_a_second_reader_shares_full_blocks_and_writes_elsewhere() -> None:
    """Guards against a shared block being overwritten (case 28, third reader)."""
    kv = make_kv()
    readers = [prefill(kv, make_request(name, range(9), 8), row) for row, name in enumerate("abc")]
    tables = [reader.block_table.block_ids for reader in readers]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    for reader in readers:
        assert reader.kv_len == 8
        assert kv.reserve_rows(reader, 1)
    open_blocks = [table[2] for table in tables]
    assert len(set(open_blocks)) == 3
    audit(kv, readers)
    kv.release(readers[0])
    readers[0].row, readers[0].status = None, RequestStatus.WAITING
    audit(kv, readers)


def test_prefix_caching_off_publishes_and_finds_nothing() -> None:
    """Guards against hits behind the back of a user who switched them off."""
    kv = make_kv(caching=False)
    kv.release(prefill(kv, make_request("a", range(9), 4)))
    assert kv.stats().num_cached == 0
    assert kv.match_prefix(make_request("b", range(9), 4)) == 0


def test_prefill_cannot_advance_past_its_rows_or_its_tokens() -> None:
    """Guards against kv_len covering rows that nobody wrote (case 30)."""
    kv = make_kv()
    request = make_request("a", range(12), 4)
    with pytest.raises(AssertionError, match="0 rows reserved"):
        kv.advance_prefill(request, 1)
    kv.reserve_prefill(request, 5)
    with pytest.raises(AssertionError, match="6 tokens prefilled with 5 rows"):
        kv.advance_prefill(request, 6)
    with pytest.raises(AssertionError, match="12 prefill rows asked"):
        kv.reserve_prefill(request, 12)
    assert request.kv_len == 0
    assert kv.reserve_rows(request, 12)
    with pytest.raises(AssertionError, match="12 tokens prefilled with 11 left"):
        kv.advance_prefill(request, 12)


def test_misuse_is_refused() -> None:
    """Guards against speculation before prefill, and a prefix matched over live KV."""
    kv = make_kv()
    request = make_request("a", range(12), 4)
    with pytest.raises(AssertionError, match="not decode-ready"):
        kv.reserve_speculative(request, 1)
    prefill(kv, request)
    with pytest.raises(AssertionError, match="no row for its last token"):
        kv.reserve_speculative(request, 1)
    with pytest.raises(AssertionError, match="holds KV already"):
        kv.match_prefix(request)
