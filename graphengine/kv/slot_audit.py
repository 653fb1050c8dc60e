"""Slot audit: which slots of paged storages a step has changed.

Owns a copy of what they held before it. Knows storages by their shapes alone: KV of a layer,
target's or draft's, or hidden states. Who may write where is said by the caller, out of the
requests' own tables, so that a slip in a step's slot mapping shows at the step that made it. Works
where the storages lie, and doubles their memory: meant for tests and debugging.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from graphengine.kv.auditor import AuditError

Tensor = torch.Tensor


class SlotAudit:
    """See the module docstring.

    Args:
        storages: by name, for messages: KV caches `[num_blocks, 2, block_size, num_kv_heads,
            head_dim]`, or hidden states `[num_blocks * block_size, width]`; contiguous.
        block_size: the first so many slots are the null block's, which anybody may write.
    """

    def __init__(self, storages: Mapping[str, Tensor], block_size: int) -> None:
        self._storages = {name: _by_slot(one, block_size) for name, one in storages.items()}
        self._before = {name: torch.empty_like(one) for name, one in self._storages.items()}
        self._block_size = block_size

    def begin(self) -> None:
        """Remember what all slots hold now."""
        for name, storage in self._storages.items():
            self._before[name].copy_(storage)

    def check(self, slots: Iterable[int]) -> None:
        """Hold what has been written since `begin` to these slots.

        Raises:
            AuditError: another slot holds other bits than it did.
        """
        for name, storage in self._storages.items():
            changed = (self._before[name] != storage).any(-1).any(1).flatten()
            changed[: self._block_size] = False
            stray = sorted(set(changed.nonzero().flatten().tolist()) - set(slots))
            if stray:
                raise AuditError(f"{name}: slots {stray} were written, which the step does not own")


def _by_slot(storage: Tensor, block_size: int) -> Tensor:
    """The storage's bits, as integers [num_blocks, parts, block_size, numbers]; a view."""
    bits = storage.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[storage.dtype.itemsize])
    rows = bits.flatten(3) if bits.ndim > 2 else bits.view(-1, 1, block_size, bits.shape[1])
    widest = rows.shape[-1] * rows.itemsize % torch.int64.itemsize == 0
    return rows.view(torch.int64) if widest else rows
