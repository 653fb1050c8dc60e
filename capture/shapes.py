"""Shape table: which (num_reqs, query_len, tier) cells exist, and which one serves a batch.

Owns the enumeration and the look-up. Knows nothing of graphs, models or memory: capture asks it
what to capture, dispatch asks it what to replay, and both get the same frozen key. Keys count
requests and query length, never tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from capture.config import CaptureConfig

DEFAULT_DRAFT_LENGTHS = (0, 1, 2, 3, 6)


@dataclass(frozen=True, slots=True, order=True)
class ShapeKey:
    """One cell. The capture key and the dispatch result are the same object."""

    num_reqs: int  # padded rows of requests
    query_len: int  # k + 1: the last known token's row, then k drafts
    tier: str  # opaque tag; the sampler's tiers in practice

    @property
    def num_tokens(self) -> int:
        return self.num_reqs * self.query_len

    def __str__(self) -> str:
        return f"{self.num_reqs}x{self.query_len}:{self.tier}"


@dataclass(frozen=True, slots=True)
class ShapeTable:
    """The grid `num_reqs` ladder x draft ladder x tiers, enumerated once."""

    num_reqs: tuple[int, ...]  # ascending; the last is max_num_seqs
    draft_lengths: tuple[int, ...]  # ascending; the first is 0, the last is max_draft_tokens
    tiers: tuple[str, ...]

    @classmethod
    def from_config(
        cls,
        config: CaptureConfig,
        *,
        max_num_seqs: int,
        max_draft_tokens: int,
        tiers: Sequence[str],
    ) -> ShapeTable:
        """Build the table.

        Raises:
            ValueError: a ladder entry above the engine's maximum.
        """
        if max_num_seqs < 1 or max_draft_tokens < 0 or not tiers:
            raise ValueError(
                f"shape table needs max_num_seqs >= 1, max_draft_tokens >= 0 and a tier; "
                f"got {max_num_seqs}, {max_draft_tokens}, {list(tiers)}"
            )
        reqs = config.num_reqs or default_num_reqs(max_num_seqs)
        drafts = config.draft_lengths or tuple(
            d for d in DEFAULT_DRAFT_LENGTHS if d <= max_draft_tokens
        )
        if max(reqs) > max_num_seqs:
            raise ValueError(
                f"CaptureConfig.num_reqs: {max(reqs)} is above max_num_seqs={max_num_seqs}; "
                f"lower it or raise max_num_seqs"
            )
        if max(drafts) > max_draft_tokens:
            raise ValueError(
                f"CaptureConfig.draft_lengths: {max(drafts)} is above "
                f"max_draft_tokens={max_draft_tokens}; "
                f"lower it or raise max_draft_tokens"
            )
        return cls(
            num_reqs=tuple(sorted({*reqs, max_num_seqs})),
            draft_lengths=tuple(sorted({0, *drafts, max_draft_tokens})),
            tiers=tuple(tiers),
        )

    def __iter__(self) -> Iterator[ShapeKey]:
        """Cells, largest first (so that one memory pool sized by the first serves all)."""
        return iter(self._cells(self.draft_lengths, self.tiers))

    def draft_cells(self, tier: str) -> list[ShapeKey]:
        """Cells of a tier beside the table's own: those that have drafts, largest first."""
        return self._cells(self.draft_lengths[1:], (tier,))

    def _cells(self, draft_lengths: Sequence[int], tiers: Sequence[str]) -> list[ShapeKey]:
        keys = [ShapeKey(n, d + 1, t) for n in self.num_reqs for d in draft_lengths for t in tiers]
        return sorted(keys, key=lambda key: (-key.num_tokens, -key.num_reqs, key.tier))

    def __len__(self) -> int:
        return len(self.num_reqs) * len(self.draft_lengths) * len(self.tiers)

    def dispatch(self, num_reqs: int, num_draft_tokens: int, tier: str) -> ShapeKey:
        """The smallest cell that holds `num_reqs` requests with up to `num_draft_tokens` drafts
        each.
        """
        assert 1 <= num_reqs <= self.num_reqs[-1], (
            f"{num_reqs} requests: table holds 1..{self.num_reqs[-1]}"
        )
        assert 0 <= num_draft_tokens <= self.draft_lengths[-1], (
            f"{num_draft_tokens} drafts: table holds 0..{self.draft_lengths[-1]}"
        )
        rows = self.num_reqs[bisect_left(self.num_reqs, num_reqs)]
        drafts = self.draft_lengths[bisect_left(self.draft_lengths, num_draft_tokens)]
        return ShapeKey(rows, drafts + 1, tier)


def default_num_reqs(max_num_seqs: int) -> tuple[int, ...]:
    """Every size up to 8, then four steps an octave: 10, 12, 14, 16, 20, 24, 28, 32, 40, ...

    On CPU a padding row costs what a live one costs, so less than a fifth of a cell may be padding.
    The maximum is added by the table.
    """
    ladder, size = [], 1
    while size <= max_num_seqs:
        ladder.append(size)
        size += max(1, (1 << (size.bit_length() - 1)) // 4)
    return tuple(ladder)
