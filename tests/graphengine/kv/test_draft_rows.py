"""Draft KV over the target's blocks: how far it is valid, who inherits it, what is shared."""

from __future__ import annotations

import pytest

from graphengine.commit import commit
from graphengine.kv.auditor import AuditError, audit
from graphengine.kv.manager import KVManager
from graphengine.request import Request
from tests.graphengine.kv.build import make_kv, prefill
from tests.graphengine.scheduler.simulation import make_request

SIZE = 4


def make(lookahead: int, num_blocks: int = 32) -> KVManager:
    return KVManager(num_blocks=num_blocks, block_size=SIZE, lookahead=lookahead)


def step(kv: KVManager, request: Request, tokens: list[int], drafts: int, rows: int | None) -> None:
    """A verify step that emits tokens, the proposer saying that `rows` draft rows are valid."""
    assert kv.reserve_rows(request, drafts + 1)
    commit(kv, request, tokens, drafts, draft_kv_len=rows)


def test_draft_rows_end_where_the_kept_rows_do() -> None:
    """Guards case 6: of the drafts that were run on, only accepted ones stay."""
    kv = make_kv()
    request = prefill(kv, make_request("a", range(6), 30))
    kv.keep_draft_rows(request, 5)
    step(kv, request, [50, 51], drafts=3, rows=6 + 2)  # 6 of the history, 2 of 3 drafts run on
    assert (request.kv_len, request.draft_kv_len) == (7, 7)
    step(kv, request, [52, 53, 54, 55], drafts=3, rows=8 + 2)  # all accepted: the last was not run
    assert (request.kv_len, request.draft_kv_len) == (11, 10)
    step(kv, request, [56], drafts=0, rows=None)  # a step without drafts
    assert (request.kv_len, request.draft_kv_len) == (12, 10)
    audit(kv, [request])


def test_who_finds_a_prefix_inherits_its_draft_rows() -> None:
    """Guards a hit that trusts draft KV which nobody has computed, or computes it again."""
    kv = make_kv()
    first = prefill(kv, make_request("a", range(14), 4))
    kv.keep_draft_rows(first, 9)  # two blocks whole, the third begun
    second = make_request("b", [*range(12), 99, 99], 4)
    assert kv.match_prefix(second) == 12
    assert second.draft_kv_len == 8
    second.row = 1
    kv.release(first)
    third = make_request("c", range(14), 4)
    assert kv.match_prefix(third) == 12
    assert third.draft_kv_len == 8


def test_a_block_that_is_handed_out_anew_has_no_draft_rows() -> None:
    """Guards valid draft KV of somebody else's tokens."""
    kv = make(0, num_blocks=4)
    first = prefill(kv, make_request("a", range(13), 2))
    kv.keep_draft_rows(first, 12)
    blocks = list(first.block_table.block_ids)
    assert all(kv.pool.is_drafted(block) for block in blocks)
    kv.release(first)
    second = prefill(kv, make_request("b", range(50, 63), 2))
    assert sorted(second.block_table.block_ids) == sorted(blocks)
    assert second.draft_kv_len == 0
    assert not any(kv.pool.is_drafted(block) for block in blocks)


def test_preemption_gives_draft_rows_up() -> None:
    kv = make_kv(caching=False)
    request = prefill(kv, make_request("a", range(10), 4))
    kv.keep_draft_rows(request, 9)
    kv.release(request)
    assert request.draft_kv_len == 0
    kv.start_over([request])
    assert request.draft_kv_len == 0


@pytest.mark.parametrize(("lookahead", "shared"), [(0, 8), (1, 4), (2, 4), (4, 4)])
def test_a_block_is_shared_only_by_who_goes_on_alike(lookahead: int, shared: int) -> None:
    """Guards hidden-state drafts: a slot's row depends on tokens behind it, maybe a block on."""
    kv = make(lookahead)
    prefill(kv, make_request("a", [*range(8), 100, 101, 102, 103, 104], 4), row=0)
    other = make_request("b", [*range(8), 200, 201, 202, 203, 204], 4)
    assert kv.match_prefix(other) == shared
    same = make_request("c", [*range(8), 100, 101, 102, 103, 105, 106], 4)
    assert kv.match_prefix(same) == (12 if lookahead == 0 else 8)


def test_a_block_between_two_of_different_fates_is_not_mixed_up() -> None:
    """Guards a chain of blocks of two publishers, whose middle depends on what came behind it."""
    kv = make(1)
    prefill(kv, make_request("a", [0, 1, 2, 3, 7, 7, 7, 7, 7], 4), row=0)
    prefill(kv, make_request("b", [0, 1, 2, 3, 8, 8, 8, 8, 8], 4), row=1)
    for follower, blocks in ((7, 2), (8, 2), (9, 0)):
        found = make_request("c", [0, 1, 2, 3, *[follower] * 5], 4)
        assert kv.match_prefix(found) == blocks * SIZE, follower
        kv.release(found)


@pytest.mark.parametrize("lookahead", [1, 2, 3])
def test_a_block_is_published_once_its_lookahead_is_known(lookahead: int) -> None:
    """Guards blocks that would never be found, since they were full too early."""
    kv = make(lookahead)
    request = prefill(kv, make_request("a", range(6), 30))
    known = 6
    for token in range(60, 66):
        step(kv, request, [token], drafts=0, rows=None)
        known += 1
        expected = max(0, min(request.kv_len, known - lookahead)) // SIZE
        published = [kv.pool.digest(block) is not None for block in request.block_table.block_ids]
        assert sum(published) == expected
        audit(kv, [request])


def test_the_auditor_finds_draft_rows_beyond_the_target_s() -> None:
    kv = make_kv()
    request = prefill(kv, make_request("a", range(10), 4))
    request.draft_kv_len = request.kv_len + 1
    with pytest.raises(AuditError, match="more than kv_len"):
        audit(kv, [request])


def test_the_auditor_finds_blocks_that_nobody_marked() -> None:
    kv = make_kv()
    request = prefill(kv, make_request("a", range(10), 4))
    request.draft_kv_len = 8
    with pytest.raises(AuditError, match="not known to hold draft KV"):
        audit(kv, [request])
