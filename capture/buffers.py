"""Static buffers: one storage a name, allocated once, seen by every captured cell at the same
address.

Owns allocation, the views of a cell, and the declared fill of padding. Knows shapes only as
symbols: R requests, Q query length, T = R * Q tokens. Who writes a buffer is its role: the host
(`input`), the captured step (`scratch`, `output`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from capture.shapes import ShapeKey

Role = Literal["input", "scratch", "output"]
Dim = int | str  # a size, or a symbol: R, R+1 or T


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSpec:
    """Declaration of one static buffer."""

    name: str
    shape: tuple[Dim, ...]
    dtype: torch.dtype
    role: Role
    fill: float | int = 0  # value of the padding rows, rewritten each step for inputs
    cells_only: bool = False  # not part of prefill views, so sized by the largest cell alone

    def resolve(self, *, num_reqs: int, num_tokens: int) -> tuple[int, ...]:
        sizes = {"R": num_reqs, "R+1": num_reqs + 1, "T": num_tokens}
        return tuple(d if isinstance(d, int) else sizes[d] for d in self.shape)


def garbage(dtype: torch.dtype, *, largest: bool = False) -> float | int:
    """A value that shows where it is used: NaN or the smallest integer, infinity or the largest."""
    if dtype.is_floating_point:
        return float("inf") if largest else float("nan")
    if dtype == torch.bool:
        return largest
    return torch.iinfo(dtype).max if largest else torch.iinfo(dtype).min


class StaticBuffers:
    """The storages behind all cells; views of them by shape.

    Args:
        specs: the declarations; names must be distinct.
        max_num_reqs: the largest R of any view.
        max_num_tokens: the largest T of a prefill view.
        max_cell_tokens: the largest T of a cell.
        device: where the storages live.
    """

    def __init__(
        self,
        specs: Iterable[BufferSpec],
        *,
        max_num_reqs: int,
        max_num_tokens: int,
        max_cell_tokens: int,
        device: torch.device,
    ) -> None:
        self.device = device
        self.specs: dict[str, BufferSpec] = {}
        self._storages: dict[str, torch.Tensor] = {}
        self._cells: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        for spec in specs:
            assert spec.name not in self.specs, f"buffer {spec.name} declared twice"
            most = max_cell_tokens if spec.cells_only else max(max_num_tokens, max_cell_tokens)
            size = math.prod(spec.resolve(num_reqs=max_num_reqs, num_tokens=most))
            self.specs[spec.name] = spec
            self._storages[spec.name] = torch.full(
                (size,), spec.fill, dtype=spec.dtype, device=device
            )

    @property
    def num_bytes(self) -> int:
        return sum(storage.nbytes for storage in self._storages.values())

    def cell(self, key: ShapeKey) -> dict[str, torch.Tensor]:
        """Views, by name, of the leading elements of every storage in the cell's shape.

        Made once a shape: cells of all tiers that have it get the same tensors.
        """
        shape = key.num_reqs, key.num_tokens
        if shape not in self._cells:
            self._cells[shape] = self.new_cell(key)
        return dict(self._cells[shape])

    def new_cell(self, key: ShapeKey) -> dict[str, torch.Tensor]:
        """The same views, made anew."""
        return {
            name: self._view(spec, key.num_reqs, key.num_tokens)
            for name, spec in self.specs.items()
        }

    def whole(self, name: str) -> torch.Tensor:
        """The flat storage of a name, whatever the cell."""
        return self._storages[name]

    def prefill(self, *, num_reqs: int, num_tokens: int) -> dict[str, torch.Tensor]:
        """Views for a varlen forward of `num_tokens` rows over `num_reqs` requests."""
        return {
            name: self._view(spec, num_reqs, num_tokens)
            for name, spec in self.specs.items()
            if not spec.cells_only
        }

    def _view(self, spec: BufferSpec, num_reqs: int, num_tokens: int) -> torch.Tensor:
        shape = spec.resolve(num_reqs=num_reqs, num_tokens=num_tokens)
        storage, size = self._storages[spec.name], math.prod(shape)
        assert size <= storage.numel(), f"{spec.name} {shape} is larger than its static buffer"
        return storage[:size].view(shape)

    def addresses(self) -> Mapping[str, int]:
        return {name: storage.data_ptr() for name, storage in self._storages.items()}

    def poison(self, roles: tuple[Role, ...], *, largest: bool = False) -> None:
        """Overwrite all storages of these roles with `garbage` of their dtype."""
        for name, spec in self.specs.items():
            if spec.role in roles:
                self._storages[name].fill_(garbage(spec.dtype, largest=largest))

    def clear(self, roles: tuple[Role, ...]) -> None:
        """Overwrite all storages of these roles with their declared fill."""
        for name, spec in self.specs.items():
            if spec.role in roles:
                self._storages[name].fill_(spec.fill)

    def snapshot(self, roles: tuple[Role, ...]) -> dict[str, torch.Tensor]:
        """Copies of all storages of these roles."""
        return {
            name: self._storages[name].clone()
            for name, spec in self.specs.items()
            if spec.role in roles
        }

    def restore(self, snapshot: Mapping[str, torch.Tensor]) -> None:
        for name, values in snapshot.items():
            self._storages[name].copy_(values)

    def release(self) -> None:
        """Drop the storages; every view handed out before must be gone too."""
        self._cells.clear()
        self._storages.clear()
