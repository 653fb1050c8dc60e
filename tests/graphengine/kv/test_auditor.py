"""Auditor: each kind of slip, planted, must be found and named."""

from collections.abc import Callable

import pytest

from graphengine.kv.auditor import AuditError, audit
from graphengine.kv.manager import KVManager
from graphengine.request import Request, RequestStatus
from tests.graphengine.kv.build import make_kv, prefill
from tests.graphengine.scheduler.simulation import make_request

Plant = Callable[[KVManager, Request, Request], object]


def healthy() -> tuple[KVManager, Request, Request]:
    """Two decoding requests that share their first block, and a cached block of a third."""
    kv = make_kv()
    a = prefill(kv, make_request("a", range(10), 20), row=0)
    b = prefill(kv, make_request("b", [0, 1, 2, 3, 9, 9, 9, 9, 9, 9], 20), row=1)
    kv.release(prefill(kv, make_request("c", range(40, 46), 4), row=2))
    return kv, a, b


def test_a_healthy_state_passes() -> None:
    """Guards against an auditor that objects to everything, which the plants would hide."""
    kv, a, b = healthy()
    assert a.block_table.block_ids[0] == b.block_table.block_ids[0]
    audit(kv, [a, b])


def _set(name: str, value: object) -> Plant:
    return lambda kv, a, b: setattr(a, name, value)


def _hold_row_while_waiting(kv: KVManager, a: Request, b: Request) -> None:
    kv.release(a)
    a.status = RequestStatus.WAITING


def _forget_table(kv: KVManager, a: Request, b: Request) -> None:
    a.block_table.block_ids.clear()


def _steal(kv: KVManager, a: Request, b: Request) -> None:
    a.block_table.block_ids[-1] = b.block_table.block_ids[-1]


def _shift_shared(kv: KVManager, a: Request, b: Request) -> None:
    ids = b.block_table.block_ids
    ids[0], ids[1] = ids[1], ids[0]


def _share_private_block(kv: KVManager, a: Request, b: Request) -> None:
    block = a.block_table.block_ids[1]
    digest = kv.pool._digest_of.pop(block)
    del kv.pool._block_of[digest]
    kv.pool.free([b.block_table.block_ids[1]])
    b.block_table.block_ids[1] = block
    kv.pool._ref_counts[block] += 1


def _extra_block(kv: KVManager, a: Request, b: Request) -> None:
    extra = kv.pool.allocate(1)
    assert extra is not None
    a.block_table.append(extra)


def _free_behind_its_back(kv: KVManager, a: Request, b: Request) -> None:
    kv.pool.free(a.block_table.block_ids[-1:])


def _leak(kv: KVManager, a: Request, b: Request) -> None:
    kv.pool.allocate(1)


def _publish_open_block(kv: KVManager, a: Request, b: Request) -> None:
    kv.pool.publish(a.block_table.block_ids[-1], b"too early")


def _change_history(kv: KVManager, a: Request, b: Request) -> None:
    a.token_ids[0] += 1
    a.block_digests.clear()


def _stale_digest(kv: KVManager, a: Request, b: Request) -> None:
    a.block_digests[1] = b"stale"


def _lose_free_block(kv: KVManager, a: Request, b: Request) -> None:
    kv.pool._clean.pop()


def _double_free_entry(kv: KVManager, a: Request, b: Request) -> None:
    kv.pool._clean.append(kv.pool._clean[0])


def _unknown_on_free_list(kv: KVManager, a: Request, b: Request) -> None:
    kv.pool._clean.append(99)


def _null_on_free_list(kv: KVManager, a: Request, b: Request) -> None:
    kv.pool._clean.append(0)


def _cached_without_digest(kv: KVManager, a: Request, b: Request) -> None:
    block = kv.pool._clean.pop()
    kv.pool._cached[block] = None


def _clean_with_digest(kv: KVManager, a: Request, b: Request) -> None:
    block, _unused = kv.pool._cached.popitem()
    kv.pool._clean.append(block)


def _index_points_elsewhere(kv: KVManager, a: Request, b: Request) -> None:
    digest = kv.pool.digest(a.block_table.block_ids[0])
    assert digest is not None
    kv.pool._block_of[digest] = a.block_table.block_ids[1]


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (_set("kv_len", 8), "kv_len that its status rules out"),
        (_set("status", RequestStatus.PREFILL), "kv_len that its status rules out"),
        (_set("status", RequestStatus.FINISHED), "does not run"),
        (_set("status", RequestStatus.WAITING), "holds 3 blocks and does not run"),
        (_hold_row_while_waiting, "state row and does not run"),
        (_set("row", None), "runs without a row"),
        (_set("row", 1), "hold the same row"),
        (_set("limit", 10), "limit reached"),
        (_set("num_reserved_rows", 4), "3 blocks for 13 rows"),
        (_set("num_reserved_rows", 21), "past its limit"),
        (_forget_table, "0 blocks for 9 rows"),
        (_steal, "1 references and (0|2) owners"),
        (_shift_shared, "is shared at several places"),
        (_share_private_block, "shared and not published"),
        (_extra_block, "4 blocks for 9 rows"),
        (_free_behind_its_back, "0 references and 1 owners"),
        (_leak, "1 references and 0 owners"),
        (_publish_open_block, "open in .* is shared or published"),
        (_change_history, "digest that is not that of"),
        (_stale_digest, "remembers a digest"),
        (_lose_free_block, "counted 0 times"),
        (_double_free_entry, "counted 2 times"),
        (_unknown_on_free_list, "does not have are free"),
        (_null_on_free_list, "block 0 is counted 2 times"),
        (_cached_without_digest, "without a digest"),
        (_clean_with_digest, "null or clean and has a digest"),
        (_index_points_elsewhere, "is indexed under 2"),
    ],
)
def test_each_planted_slip_is_found(plant: Plant, message: str) -> None:
    """Guards against a check of the auditor that no longer fires."""
    kv, a, b = healthy()
    plant(kv, a, b)
    with pytest.raises(AuditError, match=message):
        audit(kv, [a, b])


def test_publishing_with_the_cache_off_is_found() -> None:
    """Guards against digests kept for a cache that is switched off."""
    kv = make_kv(caching=False)
    a = prefill(kv, make_request("a", range(10), 20))
    kv.pool.publish(a.block_table.block_ids[0], b"x")
    with pytest.raises(AuditError, match="prefix caching off"):
        audit(kv, [a])
