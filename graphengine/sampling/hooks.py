"""Hooks: what a request may bring as code of its own, and how they are called.

A hook must be a function of its arguments alone, since a row may be computed more than once. What
it raises comes out of the step, with a note that says whose it is; the request stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import TracebackType

import torch

# Prompt ids, and output ids before the row, drafts included; to the ids that may come next.
PrefixAllowedTokens = Callable[[list[int], list[int]], Collection[int]]
# The same, and the model's logits [vocab] fp32, its own to change; to logits of the same form.
LogitsProcessor = Callable[[list[int], list[int], torch.Tensor], torch.Tensor]


class Naming:
    """Gives what a request's hook raises a note that names both."""

    def __init__(self, request_id: str, hook: str) -> None:
        self._note = f"in {hook} of request {request_id!r}; abort it, and the others go on"

    def __enter__(self) -> None:
        return

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            error.add_note(self._note)


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
