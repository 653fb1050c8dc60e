"""Hooks: what a request may bring as code of its own, and how it is called.

A hook must be a function of its arguments alone: a row may be computed more than once, and the rows
of drafts are guesses, of which most hooks will see some that never come true. So what a hook raises
about a guess is not an error yet: the block ends before that row, and if the guess does come true
the hook is asked again, where plain decoding would ask it. What it raises there comes out of the
step, with a note that says whose it is, and the request stays as it was.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any

import torch

# The prompt's ids, and the output's before the row, drafts included; to the ids that may come next.
AllowedTokens = Callable[[list[int], list[int]], Collection[int]]
# The same, and the model's logits [vocab] fp32, its own to change; to logits of the same form.
LogitsProcessor = Callable[[list[int], list[int], torch.Tensor], torch.Tensor]


class Guarded:
    """Around what a hook does for one row.

    Args:
        is_guess: the row comes after drafts. An error only sets `failed` then.
        note: goes with an error otherwise.
    """

    def __init__(self, *, is_guess: bool, note: str) -> None:
        self.failed = False
        self._is_guess, self._note = is_guess, note

    def __enter__(self) -> Guarded:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self.failed = isinstance(error, Exception)
        if self.failed and not self._is_guess:
            assert error is not None
            error.add_note(self._note)
        return self.failed and self._is_guess


def takes(hook: Callable[..., Any], num_arguments: int) -> bool:
    """Whether it can be called with so many positional arguments, as far as can be told."""
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):  # written in C, without a signature
        return True
    try:
        signature.bind(*range(num_arguments))
    except TypeError:
        return False
    return True


def run_logits_processors(
    logits: torch.Tensor,
    processors: tuple[LogitsProcessor, ...],
    prompt: list[int],
    output: list[int],
) -> torch.Tensor:
    """Logits [vocab] fp32 after all processors, in order; the given ones stay as they are.

    Raises:
        ValueError: one gives another shape or dtype.
    """
    changed = logits.clone()
    for processor in processors:
        changed = processor(list(prompt), list(output), changed)
        is_tensor = isinstance(changed, torch.Tensor)
        if not is_tensor or changed.shape != logits.shape or changed.dtype != torch.float32:
            form = f"{changed.dtype} {tuple(changed.shape)}" if is_tensor else repr(changed)
            raise ValueError(
                f"logits processor {processor!r} gave {form}: expected float32 "
                f"{tuple(logits.shape)}"
            )
    return changed
