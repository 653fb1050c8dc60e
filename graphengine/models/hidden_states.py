"""Hidden states of the target, kept beside its KV for proposers that draft from them.

One row of storage a KV slot, filled by the forward itself through its slot mapping: a row lives,
is shared and is given up with its slot, so neither chunks nor cached prefixes nor steps without
drafts leave a gap. Owns the storage; who wants which states is said by the proposer's plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy

import torch

from proposers.device import Tap

Tensor = torch.Tensor

# (storage [slots, width], x [T, hidden] fp32, slot_mapping [T] int32, first column, null slots):
# keeps the rows of x, but for those of the null block's slots, which are the first. Captured.
StoreSlots = Callable[[Tensor, Tensor, Tensor, int, int], None]


class HiddenStates:
    """States of every slot of a cache.

    Args:
        taps: what is kept, in the order of its columns.
        hidden_size: of the target.
        num_blocks, block_size: of the cache, the null block included.
        dtype: of the storage; states are rounded to it.
        device: where it lives.
        store: the op that fills it.

    Attributes:
        storage: [num_blocks * block_size, len(taps) * hidden_size].

    Raises:
        ValueError: no taps, or one twice; or the memory cannot be had.
    """

    def __init__(
        self,
        taps: Sequence[Tap],
        *,
        hidden_size: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        store: StoreSlots,
    ) -> None:
        if not taps or len(set(taps)) != len(taps):
            raise ValueError(f"hidden states {list(taps)}: expected one or more, each once")
        self.taps = tuple(taps)
        num_slots, width = num_blocks * block_size, len(taps) * hidden_size
        try:
            self.storage = torch.zeros(num_slots, width, dtype=dtype, device=device)
        except RuntimeError as error:  # torch has no class of its own for this
            raise ValueError(
                f"hidden states of num_blocks={num_blocks} ({num_slots * width * dtype.itemsize} "
                "bytes) cannot be allocated; lower CacheConfig.num_blocks or max_bytes"
            ) from error
        self._block_size = block_size
        self._hidden_size = hidden_size
        self._store = store

    def shifted(self, step: int) -> HiddenStates:
        """The same storage, filled with what lies so many layers behind each tap."""
        other = copy(self)
        other.taps = tuple(tap + step if isinstance(tap, int) else tap for tap in self.taps)
        return other

    def store(self, tap: Tap, x: Tensor, slot_mapping: Tensor) -> None:
        """Keep the rows x [T, hidden] fp32 of a tap, if anybody wants them. Captured."""
        if tap not in self.taps:
            return
        column = self.taps.index(tap) * self._hidden_size
        self._store(self.storage, x, slot_mapping, column, self._block_size)
