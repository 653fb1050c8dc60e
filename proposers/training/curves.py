"""The curves of a run: a CSV file, and a PNG of the same where matplotlib is installed."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from proposers.training.trainer import Point


def write_csv(points: Sequence[Point], path: Path) -> None:
    """A row a point; `acceptance_1` and so on are conditional, by draft position."""
    steps = len(points[0].acceptance) if points else 0
    columns = ["step", "tokens", "train_loss", "kind", "held_out_loss"]
    columns += [f"acceptance_{position}" for position in range(1, steps + 1)]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*columns, "mean_length"])
        for point in points:
            numbers = [point.held_out_loss, *point.acceptance, point.mean_length]
            writer.writerow(
                [point.step, point.tokens, f"{point.train_loss:.4f}", point.kind]
                + [f"{number:.4f}" for number in numbers]
            )


def can_draw() -> bool:
    """Whether there is matplotlib, of the extra `train`."""
    return find_spec("matplotlib") is not None


def write_png(points: Sequence[Point], path: Path, title: str) -> None:
    """Loss on the left, acceptance by draft position on the right, a line style a kind of text."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    loss, acceptance = figure.subplots(1, 2)
    for kind, style in zip(sorted({point.kind for point in points}), ("-", "--"), strict=False):
        rows = [point for point in points if point.kind == kind]
        steps = [point.step for point in rows]
        loss.plot(steps, [point.held_out_loss for point in rows], style, label=f"held out, {kind}")
        for position in range(len(rows[0].acceptance)):
            acceptance.plot(
                steps,
                [point.acceptance[position] for point in rows],
                style,
                color=f"C{position}",
                label=f"draft {position + 1}, {kind}",
            )
    loss.plot(
        [point.step for point in points],
        [point.train_loss for point in points],
        ":",
        color="grey",
        label="trained on",
    )
    for axes, name in ((loss, "cross entropy"), (acceptance, "acceptance given the drafts before")):
        axes.set(xlabel="optimiser step", ylabel=name)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    acceptance.set_ylim(0, 1)
    figure.suptitle(title)
    figure.savefig(path, dpi=100)
