"""DecodeTimer: how fast a batch decodes.

Owns the definition of decode tokens a second: the clock starts when the last request of the batch
has its first token, which leaves every prefill out, and stops with the last token of all; only
tokens emitted in between count. Reads no clock itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from graphengine.outputs import RequestOutput


@dataclass(slots=True)
class DecodeTimer:
    """Collects what a batch emits as it comes."""

    num_reqs: int
    # (seconds, tokens) of every step that emitted, in order
    _steps: list[tuple[float, int]] = field(default_factory=list)
    _started: set[str] = field(default_factory=set)
    _start_index: int | None = None

    def add(self, outputs: Sequence[RequestOutput], now: float) -> None:
        """The outputs of one engine step that ended at `now`."""
        counts: dict[str, int] = {}
        for output in outputs:
            counts[output.request_id] = counts.get(output.request_id, 0) + output.num_new_tokens
        self.add_counts(counts, now)

    def add_counts(self, counts: Mapping[str, int], now: float) -> None:
        """Tokens by request that were emitted at `now`, which never goes back."""
        num_tokens = sum(counts.values())
        if num_tokens == 0:
            return
        self._started.update(counts)
        self._steps.append((now, num_tokens))
        if self._start_index is None and len(self._started) == self.num_reqs:
            self._start_index = len(self._steps) - 1

    @property
    def start(self) -> float | None:
        """When the last request had its first token; None: not yet."""
        return None if self._start_index is None else self._steps[self._start_index][0]

    @property
    def window(self) -> tuple[float, int]:
        """Seconds and tokens of the decode window; (0.0, 0) where one step emitted everything."""
        if self._start_index is None:
            return 0.0, 0
        inside = self._steps[self._start_index + 1 :]
        if not inside:
            return 0.0, 0
        return inside[-1][0] - self._steps[self._start_index][0], sum(count for _, count in inside)
