"""Which attention serves: what is asked for, what can, and what is faster; each with its reason."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from graphengine.attention.base import AttentionShape
from graphengine.attention.choice import Choice, Contest, choose
from graphengine.attention.cpu import NativeAttention
from graphengine.attention.measure import layer_seconds
from graphengine.attention.reference import ReferenceAttention


@dataclass
class Machine:
    """Answers of a machine, and how often it was asked to measure."""

    seconds: dict[str, float]
    objection: str | None = None
    kept: list[Choice] = field(default_factory=list)
    num_measured: int = 0

    def check(self) -> None:
        if self.objection is not None:
            raise ValueError(self.objection)

    def measure(self) -> dict[str, float]:
        self.num_measured += 1
        return self.seconds

    def contest(self) -> Contest:
        return Contest(
            certain="triton",
            other="flashinfer",
            check=self.check,
            measure=self.measure,
            remembered=lambda: self.kept[-1] if self.kept else None,
            remember=self.kept.append,
        )


def test_the_faster_one_serves_and_the_choice_is_kept() -> None:
    """Another backend, so other bits, at the next start."""
    machine = Machine({"triton": 20e-6, "flashinfer": 10e-6})
    found = choose("auto", machine.contest())
    assert str(found) == (
        "attention flashinfer: measured over the table's cells: flashinfer 10.0 us, triton 20.0 us"
    )
    machine.seconds = {"triton": 1e-6, "flashinfer": 10e-6}
    assert choose("auto", machine.contest()) == found
    assert machine.num_measured == 1


def test_what_cannot_serve_is_named() -> None:
    """A silent fallback."""
    machine = Machine({}, objection="head_dim=80")
    found = choose("auto", machine.contest())
    assert (found.name, found.reason) == ("triton", "flashinfer cannot serve (head_dim=80)")
    assert machine.num_measured == 0
    with pytest.raises(ValueError, match="attention='flashinfer': head_dim=80"):
        choose("flashinfer", machine.contest())
    assert choose("triton", machine.contest()) == Choice("triton", "asked for")
    with pytest.raises(ValueError, match="attention='native': allowed here are auto, triton, flas"):
        choose("native", machine.contest())


def test_a_layer_is_timed_over_cells() -> None:
    """A clock that stops before the work, or batches that no backend could serve."""
    shape = AttentionShape(
        num_heads=4, num_kv_heads=2, head_dim=16, block_size=4, sliding_window=None
    )
    sizes = {"dtype": torch.float32, "device": torch.device("cpu"), "max_model_len": 64}
    slow, fast = (
        layer_seconds(backend, shape, [(1, 1), (3, 4)], num_layers=2, **sizes)  # type: ignore[arg-type]
        for backend in (ReferenceAttention(shape), NativeAttention(torch.float32, shape))
    )
    assert 0 < fast < slow
