"""Tables of engines side by side, on a screen and as JSON.

Owns the summary of turns: medians, and ratios paired by round. Takes no measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.table import Table

from graphengine.bench.peers.rounds import OURS, Contender, Turn
from graphengine.bench.ratios import Interval, median_interval


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerSummary:
    """All turns of a contender with one workload and batch size.

    `ratio`: our rate over its, paired by round: ours with drafts where it has drafts, else plain.
    None for ours. `num_as_plain` of `num_answers` answers with drafts are its own plain ones.
    """

    workload: str
    batch_size: int
    contender: str
    k: int
    rate: float
    first_token_seconds: float
    ratio: Interval | None
    num_as_plain: int | None
    num_answers: int
    agreement: float  # share of tokens before the first that is not ours


def summarise(turns: Sequence[Turn]) -> list[PeerSummary]:
    """One summary a (workload, batch size, contender, k), in the order of first appearance."""
    groups: dict[tuple[str, int, str, int], list[Turn]] = {}
    for one in turns:
        groups.setdefault((one.workload, one.batch_size, one.contender, one.k), []).append(one)
    found = []
    for (workload, size, name, k), group in groups.items():
        ours = next(
            found
            for (other_workload, other_size, other, other_k), found in groups.items()
            if (other_workload, other_size, other) == (workload, size, OURS)
            and bool(other_k) == bool(k)
        )
        by_round = {one.round: one.rate for one in ours}
        same = [one.num_as_plain for one in group if one.num_as_plain is not None]
        found.append(
            PeerSummary(
                workload=workload,
                batch_size=size,
                contender=name,
                k=k,
                rate=median(one.rate for one in group),
                first_token_seconds=median(one.first_token_seconds for one in group),
                ratio=None
                if name == OURS
                else median_interval([by_round[one.round] / one.rate for one in group]),
                num_as_plain=sum(same) if same else None,
                num_answers=size * len(group),
                agreement=sum(one.num_agreeing for one in group)
                / sum(one.num_tokens for one in group),
            )
        )
    return found


def peer_table(turns: Sequence[Turn]) -> Table:
    """Decode tokens a second of all, and ours over theirs."""
    table = Table(title="side by side, decode tokens/s")
    for name in ("workload", "batch", "engine", "drafts", "tokens/s", "ours over it"):
        table.add_column(name, justify="right" if name in ("batch", "tokens/s") else "left")
    for name in ("95 % interval", "first token ms", "as its plain", "as ours"):
        table.add_column(name, justify="right")
    for row in summarise(turns):
        table.add_row(
            row.workload,
            str(row.batch_size),
            row.contender,
            f"n-gram, at most {row.k}" if row.k else "none",
            f"{row.rate:.1f}",
            "-" if row.ratio is None else f"{row.ratio.median:.2f}x",
            "-" if row.ratio is None else row.ratio.bounds,
            f"{row.first_token_seconds * 1e3:.0f}",
            "-" if row.num_as_plain is None else f"{row.num_as_plain} of {row.num_answers}",
            f"{row.agreement:.0%}",
        )
    return table


def contender_table(contenders: Sequence[Contender]) -> Table:
    """What exactly ran, how long it took to start and the most memory that it held."""
    table = Table(title="what ran")
    for name in ("engine", "version", "what", "start s", "peak MiB"):
        table.add_column(name, justify="right" if name in ("start s", "peak MiB") else "left")
    for one in contenders:
        table.add_row(
            one.name,
            str(one.description["version"]),
            str(one.description["what"]),
            f"{one.start_seconds:.1f}",
            f"{one.peak_bytes / 2**20:.0f}",
        )
    return table


def as_json(contenders: Sequence[Contender], turns: Sequence[Turn]) -> dict[str, Any]:
    """Who ran, summaries and every turn."""
    return {
        "contenders": [
            {
                "name": one.name,
                "k": one.k,
                "version": one.description["version"],
                "what": one.description["what"],
                "start_seconds": one.start_seconds,
                "peak_bytes": one.peak_bytes,
            }
            for one in contenders
        ],
        "peer_summary": [asdict(row) for row in summarise(turns)],
        "turns": [asdict(one) for one in turns],
    }
