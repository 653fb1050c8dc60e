"""Prefix masks: what a request's bad words and its callable forbid, from the tokens before a row.

Computed on the host before replay, into the step's bit mask, so that the captured sampler sees them
as it sees any mask. Row j comes after j drafts. Behind a draft that cannot be accepted no row is
emitted, and a callable is not asked about a prefix that it has forbidden itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from graphengine.request import Request
from graphengine.sampling.hooks import Naming, PrefixAllowedTokens
from graphengine.sampling.masks import MASK_BITS, Masks, mask_of


def apply_prefix_masks(
    masks: Masks, request: Request, drafts: Sequence[int], vocab_size: int
) -> None:
    """Take from a request's rows what its prefix forbids.

    Args:
        masks: [query_len, words], what may come otherwise; rows behind a draft that cannot be
            accepted, and those beyond the drafts, are left alone.
        drafts: of this step, at most query_len - 1.

    Raises:
        ValueError: nothing may come after a prefix, or the callable gives something else than token
            ids. What the callable raises comes out too. A note names the request.
    """
    words = masks.view(np.uint32)
    callable_, output = request.params.prefix_allowed_tokens_fn, request.output_token_ids
    for row in range(len(drafts) + 1):
        with Naming(request.request_id, "prefix_allowed_tokens_fn"):
            if callable_ is not None:
                masks[row] &= _ask(callable_, request, output, vocab_size)
            for word in request.bad_words:
                _forbid(words[row], word, output)
            if not words[row].any():
                raise ValueError(
                    f"request {request.request_id!r}: nothing may come after {len(output)} output "
                    "tokens; bad_words, allowed_token_ids, min_tokens and "
                    "prefix_allowed_tokens_fn together forbid every token"
                )
        if row == len(drafts) or not _may_go_on(words[row], request, drafts[row]):
            return
        output = [*output, drafts[row]]


def _ask(
    allowed: PrefixAllowedTokens, request: Request, output: Sequence[int], vocab_size: int
) -> Masks:
    """The callable's answer as a mask."""
    answer = allowed(list(request.prompt_token_ids), list(output))
    found = answer if isinstance(answer, np.ndarray) else np.asarray(list(answer))
    is_ids = found.ndim == 1 and np.issubdtype(found.dtype, np.integer)
    if not is_ids or found.min() < 0 or found.max() >= vocab_size:  # an empty list is of floats
        raise ValueError(
            f"prefix_allowed_tokens_fn gave {found.tolist()[:8]!r}: expected token ids in "
            f"[0, {vocab_size}), at least one"
        )
    return mask_of(found, vocab_size)


def _forbid(words: npt.NDArray[np.uint32], word: Sequence[int], output: Sequence[int]) -> None:
    """The last token of a bad word, where all tokens before it have come."""
    *before, last = word
    if len(output) >= len(before) and list(output[len(output) - len(before) :]) == before:
        words[last // MASK_BITS] &= ~np.uint32(1 << last % MASK_BITS)


def _may_go_on(words: npt.NDArray[np.uint32], request: Request, draft: int) -> bool:
    """Whether a row behind this draft may be emitted."""
    allowed = bool(words[draft // MASK_BITS] >> np.uint32(draft % MASK_BITS) & np.uint32(1))
    return allowed and draft not in request.stop_token_ids
