"""What a draft is trained for and judged by: the target's own distribution, and its greedy tokens.

Loss is the cross entropy against the target's distribution, restricted to the draft vocabulary and
renormalised, of every step of the unroll. Acceptance is what greedy verification would accept: the
draft's likeliest token is the target's. Knows nothing of optimisers or files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from proposers.training.batches import Batch, shifted
from proposers.training.heads import Draft
from proposers.training.target import Target

Tensor = torch.Tensor


@dataclass(slots=True)
class Acceptance:
    """How many drafts of each step there were whose forerunners were all right, and how many of
    those were right themselves.
    """

    drafted: list[int]
    accepted: list[int]

    def __add__(self, other: Acceptance) -> Acceptance:
        if not self.drafted:
            return other
        return Acceptance(
            [a + b for a, b in zip(self.drafted, other.drafted, strict=True)],
            [a + b for a, b in zip(self.accepted, other.accepted, strict=True)],
        )

    @property
    def rates(self) -> list[float]:
        """Conditional acceptance by step; 0 where there was no draft."""
        pairs = zip(self.accepted, self.drafted, strict=True)
        return [accepted / drafted if drafted else 0.0 for accepted, drafted in pairs]

    @property
    def mean_length(self) -> float:
        """Tokens of a verify step with that many drafts, the bonus included."""
        length = survives = 1.0
        for rate in self.rates:
            survives *= rate
            length += survives
        return length


class Objective:
    """See the module docstring.

    Args:
        target: what is drafted for.
        draft_ids: int64 [draft vocabulary], ascending; None: all of the target's.
        steps: of the unroll.
        decay: weight of a step's loss relative to the one before.
    """

    def __init__(
        self, target: Target, draft_ids: Tensor | None, *, steps: int, decay: float
    ) -> None:
        device = target.lm_head.device
        ids = torch.arange(target.vocab_size) if draft_ids is None else draft_ids
        self._ids = ids.to(device)
        self._head = target.lm_head[self._ids].float()  # [draft vocabulary, hidden]
        self._can_draft = torch.zeros(target.vocab_size, dtype=torch.bool, device=device)
        self._can_draft[self._ids] = True
        self._steps = steps
        self._decay = decay

    def loss(self, draft: Draft, batch: Batch, steps: int | None = None) -> Tensor:
        """Mean over the rows of each step, weighted over the steps; a scalar with gradients.

        Rows whose likeliest token cannot be drafted are left out (EAGLE-3's own rule): whatever
        they learn would be rejected.

        Args:
            steps: of the unroll; None: all.
        """
        probs = self._probs(batch)
        total, weights = batch.final.new_zeros(()), 0.0
        for step, rows in enumerate(draft.unroll(batch, steps or self._steps)):
            known = step + draft.ahead - 1  # row a is about what the target says at a + known
            use = (
                shifted(batch.counts, known + 1) & self._can_draft[shifted(batch.greedy_ids, known)]
            )
            if use.any():
                wanted = probs[:, known:][use[:, : use.shape[1] - known]]
                weight = self._decay**step
                total = total + weight * functional.cross_entropy(draft.logits(rows[use]), wanted)
                weights += weight
        return total / max(weights, 1.0)

    @torch.no_grad()
    def acceptance(self, draft: Draft, batch: Batch) -> Acceptance:
        """Of chains from every position.

        A chain goes on where its draft is the target's token, and that the text's: behind any other
        the text is not what decoding would have come to.
        """
        found = Acceptance([], [])
        alive = torch.ones_like(batch.counts)
        for step, matches in enumerate(self._matches(draft, batch)):
            known = step + draft.ahead - 1
            alive = alive & shifted(batch.counts, known + 1)
            found.drafted.append(int(alive.sum()))
            alive = alive & matches
            found.accepted.append(int(alive.sum()))
            followed = batch.token_ids[:, 1:] == batch.greedy_ids[:, :-1]
            alive = alive & shifted(functional.pad(followed, (0, 1)), known)
        return found

    def _matches(self, draft: Draft, batch: Batch) -> Iterator[Tensor]:
        """bool [B, L] a step: whether the row's likeliest token is the target's."""
        for step, rows in enumerate(draft.unroll(batch, self._steps)):
            known = step + draft.ahead - 1
            use = shifted(batch.counts, known + 1)
            likeliest = self._ids[draft.logits(rows[use]).argmax(-1)]
            matches = torch.zeros_like(use)
            matches[use] = likeliest == shifted(batch.greedy_ids, known)[use]
            yield matches
        if not draft.chains:
            for later in range(1, self._steps):
                yield shifted(matches, later)

    @torch.no_grad()
    def _probs(self, batch: Batch) -> Tensor:
        """[B, L, draft vocabulary] fp32, the target's next token at each position."""
        with torch.autocast(batch.final.device.type, enabled=False):
            return functional.softmax(batch.final @ self._head.T, dim=-1)
