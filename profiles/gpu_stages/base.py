"""What a stage is, and what it is given: results that are kept as they come, a clock, models."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from profiles.inflate import PRESETS, Sizes, inflate

TINY = Path("tests/weights/tiny")  # from the root of the checkout, where all of this runs
READY = "ready"  # a file that says that a model was written to its end


@dataclass(slots=True, kw_only=True)
class Context:
    """What a stage sees. `result` is what it has found so far, an earlier call's included."""

    folder: Path
    scratch: Path
    model: str | None
    device: str
    result: dict[str, Any] = field(default_factory=dict)
    save: Callable[[Mapping[str, Any]], None] = lambda result: None

    def keep(self, **found: Any) -> None:
        """Add to the result, and write it."""
        self.result |= found
        self.save(self.result)

    def missing(self, name: str) -> bool:
        return name not in self.result

    def row(self, key: str, values: Mapping[str, Any]) -> None:
        """Keep a row by its key."""
        self.keep(rows={**self.result.get("rows", {}), key: dict(values)})

    def has_row(self, key: str) -> bool:
        return key in self.result.get("rows", {})

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    def inflated(self, preset: str) -> tuple[Path, Sizes]:
        """The tiny target at the cost of a preset, written once."""
        folder = self.scratch / preset
        sizes = PRESETS[preset]
        if not (folder / READY).is_file():
            inflate(TINY / "target", folder, sizes, max_model_len=4096)
            (folder / READY).touch()
        return folder, sizes

    def small_model(self) -> tuple[str, str]:
        """The model of a small size, and what results must call it."""
        if self.model is not None:
            return self.model, Path(self.model).name
        folder, _ = self.inflated("small" if self.device == "cpu" else "1b")
        return str(folder), f"the tiny target, cost-inflated to {folder.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A part of the suite.

    Attributes:
        seconds: it is not started with less; on an H200, with a margin.
        run: raises where something is wrong.
    """

    name: str
    about: str
    seconds: float
    run: Callable[[Context], None]


class Clock:
    """Seconds of work on a device, by its own events; on the CPU, by the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def mark(self) -> Any:
        """A place in the current stream."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: Any, last: Any) -> float:
        """Seconds from one mark to the other, which is waited for."""
        if not self._cuda:
            return float(last - first)
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    def seconds(self, work: Callable[[], object], *, turns: int = 20, warm_up: int = 3) -> float:
        """Median of so many turns."""
        for _ in range(warm_up):
            work()
        marks = []
        for _ in range(turns):
            first = self.mark()
            work()
            marks.append((first, self.mark()))
        return median(self.between(*pair) for pair in marks)


def copy_bandwidth(device: torch.device, num_bytes: int = 1 << 30) -> float:
    """Bytes a second, read and written, of a copy on the device: the ceiling of this very run."""
    size = num_bytes if device.type == "cuda" else num_bytes >> 6
    x = torch.ones(size // 4, device=device)
    y = torch.empty_like(x)
    return 2 * x.nbytes / Clock(device).seconds(lambda: y.copy_(x))
