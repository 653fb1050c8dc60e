"""commit: accept all, some or none, in one operation, or change nothing."""

from collections.abc import Callable
from typing import Any

import pytest

from graphengine.commit import CommitError, commit
from graphengine.kv.auditor import audit
from graphengine.kv.manager import KVManager
from graphengine.request import Request, RequestStatus
from tests.graphengine.kv.build import make_kv, prefill
from tests.graphengine.scheduler.simulation import EOS, make_request

K = 5


def drafted(length: int, max_tokens: int = 20, **options: Any) -> tuple[KVManager, Request]:
    """A request with rows reserved for its last token and up to K drafts."""
    kv = make_kv()
    request = prefill(kv, make_request("a", range(length), max_tokens, **options))
    assert kv.reserve_rows(request, 1)
    kv.reserve_speculative(request, K)
    return kv, request


def snapshot(kv: KVManager, request: Request) -> Any:
    free = kv.pool.free_block_ids()
    table = list(request.block_table.block_ids)
    lengths = (request.kv_len, request.num_reserved_rows, list(request.token_ids))
    return free, table, lengths, kv.pool.published(), repr(request.metrics)


@pytest.mark.parametrize("length", range(1, 10))
@pytest.mark.parametrize("num_kept", range(1, K + 2))
def test_kept_rows_and_nothing_else_stay(length: int, num_kept: int) -> None:
    """Guards against a rollback that is off by one, or forgets a block, at any edge (6, 8)."""
    kv, request = drafted(length)
    commit(kv, request, range(70, 70 + num_kept), K)
    assert request.token_ids == [*range(length), *range(70, 70 + num_kept)]
    assert request.kv_len == request.num_tokens - 1 == length - 1 + num_kept
    assert len(request.block_table) == -(-request.kv_len // kv.block_size)
    assert len(kv.pool.published()) == request.kv_len // kv.block_size
    assert kv.stats().num_used == len(request.block_table)
    audit(kv, [request])


def test_many_rounds_use_the_blocks_of_their_tokens_only() -> None:
    """Guards against a slow leak over rounds that mix full, partial and no acceptance (8)."""
    kv, request = drafted(6, 50)
    for round_, num_kept in enumerate([6, 1, 3, 1, 6, 2, 5, 4, 1]):
        commit(kv, request, [80 + round_] * num_kept, K)
        assert kv.stats().num_used == -(-request.kv_len // kv.block_size)
        assert kv.reserve_rows(request, 1)
        assert kv.reserve_speculative(request, K) == K
        audit(kv, [request])


def test_counters_follow_the_kept_tokens() -> None:
    """Guards against drafts counted that a stop cut off, or empty rounds counted (47)."""
    kv, request = drafted(3, stop_token_ids=(9,))
    for sampled, num_draft_tokens, num_accepted in (
        ([1, 2, 3], 4, None),  # two accepted, one recovered
        ([1], 0, None),  # nothing proposed
        ([1], 3, None),  # all rejected
        ([1, 2], 1, None),  # all accepted, and the bonus
        ([1, 9], 5, 2),  # the second accepted draft is a stop: no recovered token follows
    ):
        commit(kv, request, sampled, num_draft_tokens, num_accepted)
        assert kv.reserve_rows(request, 1)
        kv.reserve_speculative(request, K)
    metrics = request.metrics
    assert (metrics.num_steps, metrics.num_drafts) == (5, 4)
    assert (metrics.num_draft_tokens, metrics.num_accepted_tokens) == (13, 5)
    # Emitted tokens are the accepted drafts and one more a step, less the one that the stop cut.
    assert request.num_output_tokens == 9 == 5 + 5 - 1


BAD: list[tuple[str, Callable[[KVManager, Request], object]]] = [
    ("zero tokens", lambda kv, r: commit(kv, r, [], K)),
    ("7 tokens with 6 rows written", lambda kv, r: commit(kv, r, [1] * 7, K)),
    ("4 tokens with 3 rows written", lambda kv, r: commit(kv, r, [1] * 4, 2)),
    ("6 drafts with 6 rows reserved", lambda kv, r: commit(kv, r, [1], 6)),
    ("-1 drafts", lambda kv, r: commit(kv, r, [1], -1)),
    ("placeholder, -1", lambda kv, r: commit(kv, r, [1, -1], K)),
    ("behind a stop id", lambda kv, r: commit(kv, r, [1, EOS, 2], K)),
    ("3 of 5 drafts accepted in 2", lambda kv, r: commit(kv, r, [1, 2], K, 3)),
    ("0 of 5 drafts accepted in 2", lambda kv, r: commit(kv, r, [1, 2], K, 0)),
    ("2 of 1 drafts accepted", lambda kv, r: commit(kv, r, [1, 2], 1, 2)),
]


@pytest.mark.parametrize(("message", "call"), BAD, ids=[message for message, _ in BAD])
def test_a_bad_commit_changes_nothing(
    message: str, call: Callable[[KVManager, Request], object]
) -> None:
    """Guards against rolling forward over rows nobody wrote, and against half a commit."""
    kv, request = drafted(6, ignore_eos=False)
    before = snapshot(kv, request)
    with pytest.raises(CommitError, match=message):
        call(kv, request)
    assert snapshot(kv, request) == before


def test_a_commit_past_the_limit_changes_nothing() -> None:
    """Guards against emitting more than max_tokens (cases 26, 43)."""
    kv, request = drafted(6, 3)
    assert request.num_reserved_rows == 3
    kv.reserve_rows(request, 6)  # even where rows were reserved by mistake
    before = snapshot(kv, request)
    with pytest.raises(CommitError, match="4 tokens goes past the limit"):
        commit(kv, request, [1] * 4, K)
    assert snapshot(kv, request) == before
    commit(kv, request, [1] * 3, K)
    assert request.check_finished() == "length"


def test_a_result_is_committed_once() -> None:
    """Guards against a late or repeated frame being applied to a request (case 23)."""
    kv, request = drafted(6)
    commit(kv, request, [1, 2], K)
    before = snapshot(kv, request)
    with pytest.raises(CommitError, match="without rows reserved"):
        commit(kv, request, [1], 0)
    assert snapshot(kv, request) == before


@pytest.mark.parametrize(
    "status", [RequestStatus.WAITING, RequestStatus.PREFILL, RequestStatus.FINISHED]
)
def test_only_a_decoding_request_can_commit(status: RequestStatus) -> None:
    """Guards against the result of a dropped request reaching its freed blocks (23, 26)."""
    kv, request = drafted(6)
    request.status = status
    before = snapshot(kv, request)
    with pytest.raises(CommitError, match="not decoding"):
        commit(kv, request, [1], 0)
    assert snapshot(kv, request) == before
