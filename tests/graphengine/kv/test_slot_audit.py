"""Slot audit: a slot that is written is found, whatever is written and whatever the storage."""

from __future__ import annotations

import pytest
import torch

from graphengine.kv.auditor import AuditError
from graphengine.kv.slot_audit import SlotAudit

SIZE, NUM_BLOCKS = 4, 6
WIDTHS = [("hidden states", width) for width in (13, 14, 16)]  # whole words, and not
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make_storages(dtype: torch.dtype, width: int = 14) -> dict[str, torch.Tensor]:
    return {
        "layer 0": torch.randn(NUM_BLOCKS, 2, SIZE, 3, 5).to(dtype),
        "hidden states": torch.randn(NUM_BLOCKS * SIZE, width).to(dtype),
    }


def slot_of(storage: torch.Tensor, slot: int) -> torch.Tensor:
    """All numbers of a slot, a view."""
    return storage[slot] if storage.ndim == 2 else storage[slot // SIZE, :, slot % SIZE]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "width"), [("layer 0", 8), *WIDTHS])
def test_every_slot_is_watched(name: str, width: int, dtype: torch.dtype) -> None:
    """Guards against a slot, or a half of it, that nobody looks at; and the null block's freedom.

    Every number of every slot in turn, by its lowest bit.
    """
    storages = make_storages(dtype, width)
    audit = SlotAudit(storages, SIZE)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    for slot in range(NUM_BLOCKS * SIZE):
        numbers = slot_of(storages[name], slot)
        for index in range(0, numbers.numel(), 7):
            place = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), numbers.shape))
            audit.begin()
            numbers.view(bits)[place] ^= 1
            audit.check([slot])
            if slot < SIZE:
                audit.check([])
                continue
            message = rf"{name}: slots \[{slot}\] were written"
            with pytest.raises(AuditError, match=message):
                audit.check([s for s in range(NUM_BLOCKS * SIZE) if s != slot])


def test_bits_are_compared_not_numbers() -> None:
    """Guards NaN, which equals nothing, and zeros of either sign."""
    storages = make_storages(torch.float32)
    slot_of(storages["layer 0"], 9).fill_(float("nan"))
    slot_of(storages["layer 0"], 10).fill_(0.0)
    audit = SlotAudit(storages, SIZE)
    audit.begin()
    audit.check([])
    slot_of(storages["layer 0"], 10).fill_(-0.0)
    with pytest.raises(AuditError, match=r"slots \[10\]"):
        audit.check([])


def test_nothing_to_watch_passes() -> None:
    audit = SlotAudit({}, SIZE)
    audit.begin()
    audit.check([])
