"""Reports: measured pairs and step times as tables on a screen, and as JSON.

Owns the summary of pairs (medians of paired ratios, never ratios of medians) and the layout. Takes
no measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.table import Table

from graphengine.bench.measure import DraftLengthChoice
from graphengine.bench.pairs import Pair, independent_ratios
from graphengine.bench.ratios import Interval, median_interval
from graphengine.bench.steps import StepTime


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """All pairs of one workload, batch size and k."""

    workload: str
    batch_size: int
    k: DraftLengthChoice
    num_pairs: int
    num_identical: int
    off_rate: float  # median decode tokens/s over the pairs; 0.0: no pair has a decode window
    on_rate: float
    ratio: Interval | None
    acceptance_rate: float
    mean_acceptance_length: float


def summarise(pairs: Sequence[Pair]) -> list[Summary]:
    """One summary a (workload, batch size, k), in the order of first appearance."""
    groups: dict[tuple[str, int, DraftLengthChoice], list[Pair]] = {}
    for pair in pairs:
        groups.setdefault((pair.workload, pair.batch_size, pair.k), []).append(pair)
    return [_summary(group) for group in groups.values()]


def _summary(pairs: Sequence[Pair]) -> Summary:
    first, ratios = pairs[0], independent_ratios(pairs)
    drafted = sum(pair.on.num_draft_tokens for pair in pairs)
    steps = sum(pair.on.num_steps for pair in pairs)
    return Summary(
        workload=first.workload,
        batch_size=first.batch_size,
        k=first.k,
        num_pairs=len(pairs),
        num_identical=sum(pair.difference is None for pair in pairs),
        off_rate=_median_rate([pair.off.rate for pair in pairs]),
        on_rate=_median_rate([pair.on.rate for pair in pairs]),
        ratio=median_interval(ratios) if ratios else None,
        acceptance_rate=sum(p.on.num_accepted_tokens for p in pairs) / drafted if drafted else 0.0,
        mean_acceptance_length=sum(p.on.num_tokens for p in pairs) / steps if steps else 0.0,
    )


def _median_rate(rates: Sequence[float]) -> float:
    measured = [rate for rate in rates if rate > 0]
    return median(measured) if measured else 0.0


def pair_table(summaries: Sequence[Summary]) -> Table:
    """The on/off table."""
    table = Table(title="speculation on against off, decode tokens/s")
    for name in ("workload", "batch", "k", "off", "on", "on/off", "95 % interval"):
        table.add_column(name, justify="left" if name == "workload" else "right")
    for name in ("accepted", "tokens a step", "identical"):
        table.add_column(name, justify="right")
    for row in summaries:
        table.add_row(
            row.workload,
            str(row.batch_size),
            str(row.k),
            rate_text(row.off_rate),
            rate_text(row.on_rate),
            "-" if row.ratio is None else f"{row.ratio.median:.2f}x",
            "-" if row.ratio is None else row.ratio.bounds,
            f"{row.acceptance_rate:.0%}",
            f"{row.mean_acceptance_length:.2f}",
            f"{row.num_identical} of {row.num_pairs}",
        )
    return table


def rate_text(rate: float) -> str:
    """Tokens a second; a dash where nothing was decoded after the first step."""
    return f"{rate:.1f}" if rate > 0 else "-"


def step_table(steps: Sequence[StepTime]) -> Table:
    """Step times; `x plain` is also the tokens a step from which that k pays."""
    table = Table(title="one captured step")
    for name in ("context", "batch", "k", "ms", "x plain", "x short context"):
        table.add_column(name, justify="right")
    for step in steps:
        plain = _find(steps, step.batch_size, 0, step.context)
        short = _find(steps, step.batch_size, step.k, min(other.context for other in steps))
        table.add_row(
            str(step.context),
            str(step.batch_size),
            str(step.k),
            f"{step.seconds * 1e3:.2f}",
            "-" if plain is None else f"{step.seconds / plain.seconds:.2f}",
            "-" if short is None or short is step else f"{step.seconds / short.seconds:.2f}",
        )
    return table


def _find(steps: Sequence[StepTime], batch_size: int, k: int, context: int) -> StepTime | None:
    wanted = (batch_size, k, context)
    found = [step for step in steps if (step.batch_size, step.k, step.context) == wanted]
    return found[0] if found else None


def as_json(pairs: Sequence[Pair], steps: Sequence[StepTime]) -> dict[str, Any]:
    """Summaries and every raw pair and step."""
    return {
        "summary": [asdict(row) for row in summarise(pairs)],
        "steps": [asdict(step) for step in steps],
        "pairs": [pair.as_json() for pair in pairs],
    }
