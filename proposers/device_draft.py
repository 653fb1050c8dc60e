"""DeviceDraft: a draft whose tokens lie on the device, where a chain has left them.

Nobody on the host has seen them, so a step can be launched that verifies them before it is known
what they are. Nor has anybody checked them: verification does, which they cannot fool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from proposers.base import NO_TOKEN, Draft, ProposeInputs, TokenArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeviceDraft(Draft):
    """See the module docstring. `token_ids` are NO_TOKEN, and `draft_kv_lens` None."""

    # int32 [at least num_reqs, k + 1]: column j of a row is its draft j. Static: they are there
    # once the chain has run, until the next chain does
    tokens: torch.Tensor
    # int32 [num_reqs]: the row of each request in them
    places: TokenArray
    # int32 [num_reqs]: `draft_kv_lens` less the number of tokens when the step runs. Negative
    # beyond that number: what was valid stays so
    ahead: TokenArray
    # whether a request lacks drafts until steps under way have landed: draft KV is missing that
    # only the host can have filled
    waits: bool

    @classmethod
    def of(
        cls, tokens: torch.Tensor, counts: TokenArray, ahead: TokenArray, *, waits: bool
    ) -> DeviceDraft:
        """The drafts of the first rows of `tokens`, so many of each."""
        num_reqs, k = len(counts), tokens.shape[1] - 1
        return cls(
            token_ids=np.full((num_reqs, k), NO_TOKEN, dtype=np.int32),
            num_draft_tokens=counts,
            tokens=tokens,
            places=np.arange(num_reqs, dtype=np.int32),
            ahead=ahead,
            waits=waits,
        )

    def rows(self, indices: Sequence[int]) -> DeviceDraft:
        """The drafts of these requests alone."""
        chosen = list(indices)
        return replace(
            self,
            token_ids=self.token_ids[chosen],
            num_draft_tokens=self.num_draft_tokens[chosen],
            places=self.places[chosen],
            ahead=self.ahead[chosen],
        )

    def copy_to(self, out: torch.Tensor) -> None:
        """Write them into out [at least num_reqs, query_len]; for the stream that the chain is in.

        What lies behind a request's own drafts is written as well, and means nothing.
        """
        width, count = min(out.shape[1], self.tokens.shape[1]) - 1, len(self.places)
        if np.array_equal(self.places, np.arange(count)):
            out[:count, :width].copy_(self.tokens[:count, :width])
            return
        for row, place in enumerate(self.places.tolist()):
            out[row, :width].copy_(self.tokens[place, :width])

    def validate(self, inputs: ProposeInputs, vocab_size: int) -> None:
        """Hold the counts to the allowances; the tokens are verification's to look at."""
        assert self.token_ids.shape == (inputs.num_reqs, inputs.k), (
            f"draft token_ids are {self.token_ids.shape} of {inputs.num_reqs} requests"
        )
        counts, allowed = self.num_draft_tokens, inputs.num_draft_tokens
        assert ((counts >= 0) & (counts <= allowed)).all(), f"{counts} drafts, allowed {allowed}"
