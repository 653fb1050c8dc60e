"""The files that a run leaves of its measurements."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from proposers.training import Point, can_draw
from proposers.training.curves import write_csv, write_png

POINTS = [
    Point(
        step=step,
        tokens=100 * step,
        train_loss=3.0 / step,
        kind=kind,
        held_out_loss=4.0 / step,
        acceptance=[0.5, 0.25],
        mean_length=1.625,
    )
    for step in (1, 2)
    for kind in ("chat", "text")
]


def test_csv_has_a_row_a_point(tmp_path: Path) -> None:
    """Guards columns that do not say which draft they are of."""
    write_csv(POINTS, tmp_path / "a.csv")
    with (tmp_path / "a.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["kind"]) for row in rows] == [
        ("1", "chat"),
        ("1", "text"),
        ("2", "chat"),
        ("2", "text"),
    ]
    assert rows[0]["acceptance_1"] == "0.5000"
    assert rows[0]["acceptance_2"] == "0.2500"
    assert rows[3]["held_out_loss"] == "2.0000"
    assert rows[0]["mean_length"] == "1.6250"


@pytest.mark.skipif(not can_draw(), reason="needs matplotlib")
def test_png_is_drawn(tmp_path: Path) -> None:
    """Guards a drawing that fails at the first measurement of a long run."""
    write_png(POINTS, tmp_path / "a.png", "title")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
