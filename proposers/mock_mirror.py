"""DraftMirror: what a stand-in knows of its draft KV, and holds the engine to.

Owns, for every slot of the cache, the tokens that its draft KV was made of. A row that the engine
says is valid must have been made of the tokens that it now stands for, by whatever prefix hit,
preemption or rollback it came there; the target's hidden states must lie beside its rows, and what
is reserved must have a place that nobody else writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from proposers.base import TokenArray
from proposers.device import DraftOps, DraftRuntime


class DraftMirror:
    """See the module docstring.

    Args:
        name: of the proposer, for messages.
        runtime: of the engine.
        ops: the proposer's.
        lookahead: how many tokens behind its own a slot's row depends on.
        num_states: columns of the target's hidden states; 0: none are kept.
    """

    def __init__(
        self, name: str, runtime: DraftRuntime, ops: DraftOps, *, lookahead: int, num_states: int
    ) -> None:
        self._name = name
        self._runtime = runtime
        self._ops = ops
        self._lookahead = lookahead
        self._num_states = num_states
        self._made_of: dict[int, int] = {}  # slot -> `_prefixes` of its tokens

    def check(
        self, tokens: TokenArray, table: TokenArray, *, cached: int, present: int, reserved: int
    ) -> None:
        """Hold a request's slots to what is said of them.

        Args:
            tokens: [num_tokens], all known.
            table: [max_blocks].
            cached: leading slots that are said to hold draft KV.
            present: leading slots that hold the target's rows.
            reserved: leading slots that have a place.

        Raises:
            AssertionError: naming what is not so.
        """
        size, name = self._runtime.block_size, self._name
        assert 0 <= cached <= present < len(tokens), (
            f"{name}: {cached} draft rows and {present} target rows of {len(tokens)} tokens"
        )
        assert present <= reserved, f"{name}: {present} target rows, {reserved} reserved"
        blocks = table[: -(-reserved // size)].tolist()
        assert 0 not in blocks, f"{name}: {reserved} rows reserved, block table {blocks}"
        assert len(set(blocks)) == len(blocks), f"{name}: a block twice in {blocks}"
        slots = self._slots(table, range(present))
        known = dict(enumerate(_prefixes(tokens.tolist()), -self._lookahead))  # by slot
        for index, slot in enumerate(slots[:cached]):
            assert self._made_of.get(slot, 0) == known.get(index), (
                f"{name}: slot {index} is said to hold draft KV of these tokens, and does not"
            )
        for cache in self._runtime.kv_caches:
            rows = cache.transpose(1, 2).flatten(0, 1)[slots[:cached]]
            assert rows.isfinite().all(), f"{name}: draft KV of a valid row is no number"
        if self._num_states and slots:
            states = torch.empty(len(slots), self._num_states)
            self._ops.load_slots(states, torch.tensor(slots, dtype=torch.int32))
            assert states.isfinite().all(), f"{name}: a hidden state of the target is missing"

    def check_owned(
        self, block_table: TokenArray, lengths: Sequence[int], reserved: Sequence[int]
    ) -> None:
        """No two requests of a batch share a block that one of them is about to write."""
        size = self._runtime.block_size
        tables = [
            table[: -(-end // size)].tolist()
            for table, end in zip(block_table, reserved, strict=True)
        ]
        holders = Counter(block for table in tables for block in table)
        for table, length in zip(tables, lengths, strict=True):
            shared = [block for block in table[(length - 1) // size :] if holders[block] > 1]
            assert not shared, f"{self._name}: blocks {shared} are another request's too"

    def remember(self, tokens: Sequence[int], table: TokenArray, made: range) -> None:
        """Draft KV of these slots has been made of the tokens [num_tokens], drafts included."""
        known = _prefixes(tokens)
        for index, slot in zip(made, self._slots(table, made), strict=True):
            self._made_of[slot] = known[index + self._lookahead]

    def forget(self, table: TokenArray, lost: range) -> None:
        """Draft KV of these slots has been written over, and stands for nothing."""
        for slot in self._slots(table, lost):
            self._made_of.pop(slot, None)

    def _slots(self, table: TokenArray, indices: range) -> list[int]:
        size = self._runtime.block_size
        return [int(table[index // size]) * size + index % size for index in indices]


def _prefixes(tokens: Sequence[int]) -> list[int]:
    """A number for each token, which stands for it and all before it."""
    found, last = [], 0
    for token in tokens:
        last = hash((last, token))
        found.append(last)
    return found
