"""A proposer whose draft length a test sets between steps."""

from __future__ import annotations

from proposers.base import Draft, ProposeInputs
from proposers.mock import MockProposer
from tests.tiny import VOCAB_SIZE


class FixedLength(MockProposer):
    """Drafts the newest token again, `length` times."""

    name = "mock-fixed-length"

    def __init__(self) -> None:
        super().__init__(vocab_size=VOCAB_SIZE)
        self.length = 0

    def propose(self, inputs: ProposeInputs) -> Draft:
        self.num_proposals += 1
        rows = [
            history[-1:].repeat(min(self.length, allowance))
            for history, allowance in zip(
                inputs.token_ids, inputs.num_draft_tokens.tolist(), strict=True
            )
        ]
        return Draft.from_rows(rows, inputs.k)
