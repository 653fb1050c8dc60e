"""Batches: padded pieces with what the target computes of them, in an order that a seed decides.

Owns the layout that training reads and which pieces come when. The order is a function of seed and
lengths alone, so that a resumed run goes on where it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

Tensor = torch.Tensor

_WINDOW = 32  # batches that are sorted by length together


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """Pieces side by side, each padded behind its end with zeros that count nowhere."""

    # [B, L] int64
    token_ids: Tensor
    # [B, L] bool: tokens that are to be predicted; no prompt, no padding
    counts: Tensor
    # [B, L] int64, the target's likeliest next token at each position
    greedy_ids: Tensor
    # [B, L, len(taps) * hidden]
    aux: Tensor
    # [B, L, hidden], behind the target's final norm
    final: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same on a device, its hidden states in fp32."""
        return Batch(
            token_ids=self.token_ids.to(device),
            counts=self.counts.to(device),
            greedy_ids=self.greedy_ids.to(device),
            aux=self.aux.to(device, torch.float32),
            final=self.final.to(device, torch.float32),
        )


def shifted(x: Tensor, by: int) -> Tensor:
    """[B, L, ...] with row a holding x[:, a + by], zeros (or False) where that is past the end."""
    if by == 0:
        return x
    by = min(by, x.shape[1])
    padding = [0, 0] * (x.dim() - 2) + [0, by]
    return functional.pad(x[:, by:], padding)


def batch_order(lengths: Sequence[int], batch_tokens: int, seed: int) -> Iterator[list[int]]:
    """Endless batches of indices: each epoch every piece once, similar lengths together.

    Args:
        lengths: of the pieces, at least one.
        batch_tokens: most of B * L, but one piece at least.
        seed: decides the order.
    """
    draw = torch.Generator().manual_seed(seed)
    window = max(1, _WINDOW * batch_tokens * len(lengths) // sum(lengths))
    while True:
        pieces = torch.randperm(len(lengths), generator=draw).tolist()
        batches: list[list[int]] = []
        for start in range(0, len(pieces), window):
            by_length = sorted(pieces[start : start + window], key=lengths.__getitem__)
            batches += _packed(by_length, lengths, batch_tokens)
        for index in torch.randperm(len(batches), generator=draw).tolist():
            yield batches[index]


def in_order(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Every piece once, by length."""
    by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
    return _packed(by_length, lengths, batch_tokens)


def _packed(ascending: Sequence[int], lengths: Sequence[int], room: int) -> list[list[int]]:
    batches: list[list[int]] = []
    for piece in ascending:
        if not batches or lengths[piece] * (len(batches[-1]) + 1) > room:
            batches.append([])
        batches[-1].append(piece)
    return batches
