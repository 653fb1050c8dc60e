"""commit: the one operation that turns verified rows into a request's tokens, or drops them.

Token list, KV length, block frees, prefix digests and counters move together or not at all; the
rows of rejected drafts are rolled back by not being kept. Knows nothing of how tokens were drafted
or verified, and stops have been applied before: what is passed here is emitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphengine.kv.manager import KVManager
from graphengine.request import Request, RequestStatus
from graphengine.sampling.logprobs import Logprob


class CommitError(AssertionError):
    """A commit that would break an invariant. Nothing was changed."""


def commit(
    kv: KVManager,
    request: Request,
    sampled_token_ids: Sequence[int],
    num_draft_tokens: int,
    num_accepted: int | None = None,
    logprobs: Sequence[Mapping[int, Logprob]] = (),
    draft_kv_len: int | None = None,
) -> None:
    """Keeps the first `len(sampled_token_ids)` rows of the verify step and drops the rest.

    Afterwards `kv_len == num_tokens - 1`, newly full blocks are published, and no block lies wholly
    beyond `kv_len`.

    Args:
        kv: the manager that reserved the rows.
        request: a decoding request with rows reserved by this step's `schedule()`.
        sampled_token_ids: `[num_sampled]` ids to emit, accepted drafts first; at least one, and
            nothing behind a stop id.
        num_draft_tokens: drafts that the verify step carried for this request; tail rows of a wider
            cell are not drafts.
        num_accepted: how many of the *kept* tokens were drafts: `num_sampled - 1`, the default, or
            `num_sampled` where a stop cut the block behind an accepted draft.
        logprobs: one for each of `sampled_token_ids`, where the request asks for them.
        draft_kv_len: leading slots that hold draft KV now, were all drafts accepted; None: the
            proposer has touched none.

    Raises:
        CommitError: the request is not decoding, no token, more tokens than rows written, past the
            limit, a negative id (a placeholder leaked), or counts that contradict each other.
    """
    ids = [int(token) for token in sampled_token_ids]
    accepted = len(ids) - 1 if num_accepted is None else num_accepted
    problem = _problem(request, ids, num_draft_tokens, accepted)
    if problem is not None:
        raise CommitError(f"{problem}: {request}")

    # The tokens decide whether a commit that breaks off has happened; all else follows from them.
    del request.token_origins[request.num_output_tokens :]
    if request.token_logprobs is not None:
        del request.token_logprobs[request.num_output_tokens :]
        request.token_logprobs.extend(logprobs)
    request.token_origins.extend(["accepted"] * accepted)
    if len(ids) > accepted:
        request.token_origins.append("bonus" if accepted == num_draft_tokens else "recovered")
    request.token_ids.extend(ids)

    metrics = request.metrics
    metrics.num_steps += 1
    metrics.num_drafts += num_draft_tokens > 0
    metrics.num_draft_tokens += num_draft_tokens
    metrics.num_accepted_tokens += accepted
    kv.keep_rows(request, len(ids))
    if draft_kv_len is not None:
        kv.keep_draft_rows(request, draft_kv_len)


def _problem(
    request: Request, ids: list[int], num_draft_tokens: int, num_accepted: int
) -> str | None:
    """What is wrong with this commit, in words; None where nothing is."""
    if request.status is not RequestStatus.DECODE or not request.is_decode_ready:
        return "commit on a request that is not decoding"
    if not ids:
        return "commit of zero tokens"
    if request.num_reserved_rows == 0:
        return "commit without rows reserved since the last one"
    if not 0 <= num_draft_tokens < request.num_reserved_rows:
        return f"{num_draft_tokens} drafts with {request.num_reserved_rows} rows reserved"
    if len(ids) > num_draft_tokens + 1:
        return f"commit of {len(ids)} tokens with {num_draft_tokens + 1} rows written"
    if request.num_tokens + len(ids) > request.limit:
        return f"commit of {len(ids)} tokens goes past the limit"
    if min(ids) < 0:
        return f"commit of a placeholder, {min(ids)}"
    if any(token in request.stop_token_ids for token in ids[:-1]):
        return f"commit of tokens behind a stop id, {ids}"
    if num_accepted not in (len(ids) - 1, len(ids)) or num_accepted > num_draft_tokens:
        return f"{num_accepted} of {num_draft_tokens} drafts accepted in {len(ids)} tokens"
    return None
