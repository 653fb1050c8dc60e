"""Row hooks: a request's bad words and its own functions, asked for every row of its block.

Runs on the host. Masks depend on the tokens before a row alone and are made before replay, in the
step's bit mask; logits processors run between two graphs. Row j comes after j drafts. Behind a
draft that may not come, or that ends the request, nobody is asked and no row is emitted, not even
where a row that has nothing left falls back to just that token. Both functions say how many rows of
the block may be emitted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from graphengine.request import Request
from graphengine.sampling.hooks import AllowedTokens, Guarded, run_logits_processors
from graphengine.sampling.masks import MASK_BITS, Masks, mask_of
from graphengine.sampling.params import listed

Words = npt.NDArray[np.uint32]


def apply_prefix_masks(
    masks: Masks, request: Request, drafts: Sequence[int], vocab_size: int
) -> int:
    """Take from a request's rows what the tokens before them forbid.

    Args:
        masks: [query_len, words], what may come otherwise.
        drafts: of this step, at most query_len - 1.

    Returns:
        How many rows may be emitted, at least 1.

    Raises:
        ValueError: nothing may come next, or `allowed_tokens_fn` gives something else than token
            ids. What it raises itself comes out too.
    """
    words, output = masks.view(np.uint32), request.output_token_ids
    for row in range(len(drafts) + 1):
        with Guarded(is_guess=row > 0, note=_note(request)) as guarded:
            _forbid(masks[row], request, output, vocab_size)
        if guarded.failed:
            return row
        if row == len(drafts) or not _may_go_on(words[row], request, drafts[row]):
            return row + 1
        output.append(drafts[row])
    raise AssertionError("the last row returns")


def apply_logits_processors(
    logits: npt.NDArray[np.float32], masks: Masks, request: Request, drafts: Sequence[int]
) -> int:
    """Replace the logits of a request's rows by what its processors make of them.

    Args:
        logits: [query_len, vocab].
        masks: [query_len, words], what may come in each row.
        drafts: of this step, at most query_len - 1.

    Returns:
        How many rows may be emitted, at least 1.

    Raises:
        ValueError: a processor gives something else than logits. What it raises itself comes out
            too.
    """
    words, output = masks.view(np.uint32), request.output_token_ids
    prompt, processors = list(request.prompt_token_ids), request.params.processors
    for row in range(len(drafts) + 1):
        with Guarded(is_guess=row > 0, note=_note(request)) as guarded:
            changed = run_logits_processors(
                torch.from_numpy(logits[row]), processors, prompt, output
            )
            logits[row] = changed.detach().numpy()
        if guarded.failed:
            return row
        if row == len(drafts) or not _may_go_on(words[row], request, drafts[row]):
            return row + 1
        if not logits[row, drafts[row]] > float("-inf"):
            return row + 1
        output.append(drafts[row])
    raise AssertionError("the last row returns")


def _note(request: Request) -> str:
    answer = f", answer {request.choice}" if request.choice else ""
    return f"raised for request {request.asked_id!r}{answer}; abort it, and the others go on"


def _forbid(mask: Masks, request: Request, output: Sequence[int], vocab_size: int) -> None:
    """Take from one row's mask what may not come after this output."""
    allowed = request.params.allowed_tokens_fn
    if allowed is not None:
        mask &= _ask(allowed, request, output, vocab_size)
    words = mask.view(np.uint32)
    for *before, last in request.bad_words:
        if len(output) >= len(before) and output[len(output) - len(before) :] == before:
            words[last // MASK_BITS] &= ~np.uint32(1 << last % MASK_BITS)
    if not mask.any():
        raise ValueError(
            f"request {request.asked_id!r}: nothing may come after {len(output)} output tokens: "
            "bad_words, allowed_token_ids, min_tokens and allowed_tokens_fn together forbid every "
            "token"
        )


def _ask(allowed: AllowedTokens, request: Request, output: Sequence[int], vocab_size: int) -> Masks:
    """The function's answer as a mask."""
    answer = allowed(list(request.prompt_token_ids), list(output))
    found = np.asarray(answer if hasattr(answer, "__array__") else listed(answer))
    is_ids = found.ndim == 1 and found.size > 0 and np.issubdtype(found.dtype, np.integer)
    if not is_ids or found.min() < 0 or found.max() >= vocab_size:
        raise ValueError(
            f"allowed_tokens_fn gave {answer!r:.80}: expected token ids in [0, {vocab_size}), "
            "at least one"
        )
    return mask_of(found, vocab_size)


def _may_go_on(words: Words, request: Request, draft: int) -> bool:
    """Whether a row behind this draft may be emitted, as far as masks and stop ids say."""
    allowed = bool(words[draft // MASK_BITS] >> np.uint32(draft % MASK_BITS) & np.uint32(1))
    return allowed and draft not in request.stop_token_ids
