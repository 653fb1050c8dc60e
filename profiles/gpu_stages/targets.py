"""The targets, and the table of what was found: met, missed, or not known.

Reads the stages' results alone, so that a table can be made of any folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Results = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on one figure; `find` returns None, or raises KeyError, where it is not known."""

    name: str
    find: Callable[[Results], float | None]
    limit: float
    unit: str = ""
    at_least: bool = False

    def line(self, results: Results) -> str:
        sign = ">=" if self.at_least else "<="
        found = self.found(results)
        value, verdict = "", "not known"
        if found is not None:
            value = f"{found:.2f}{self.unit}"
            met = found >= self.limit if self.at_least else found <= self.limit
            verdict = "met" if met else "MISSED"
        return f"| {self.name} | {sign} {self.limit:g}{self.unit} | {value} | {verdict} |"

    def found(self, results: Results) -> float | None:
        try:
            return self.find(results)
        except KeyError:
            return None


def _rows(results: Results, stage: str) -> Mapping[str, Any]:
    rows: Mapping[str, Any] = results[stage]["result"]["rows"]
    return rows


def _times_faster(results: Results) -> float:
    return 1 / float(_rows(results, "graph-vs-eager")["1 x 0, cuda"]["ratio"]["median"])


def _worst_over_floor(results: Results) -> float | None:
    rows = _rows(results, "floor").values()
    return max((float(row["over_floor"]) for row in rows), default=None)


def _table(key: str, scale: float) -> Callable[[Results], float]:
    return lambda results: _rows(results, "capture")["small model"][key] / scale


TARGETS = (
    Target("graphed step, times faster than eager, batch 1", _times_faster, 5, at_least=True),
    Target("8B shape over its floor, worst of all cells", _worst_over_floor, 1.25),
    Target(
        "8B shape over its floor, batch 1, k = 0",
        lambda results: _rows(results, "floor")["1 x 0"]["over_floor"],
        1.25,
    ),
    Target(
        "verify k = 5 over plain, batch 1, 8B shape",
        lambda results: _rows(results, "floor")["1 x 5"]["over_plain"]["median"],
        1.08,
    ),
    Target(
        "verify k = 5 over plain, batch 1, small model",
        lambda results: _rows(results, "verify-k5")["device"]["over_plain"]["median"],
        1.08,
    ),
    Target("capture of a table of 42 cells", _table("capture_seconds", 1), 60, " s"),
    Target("graphs of that table", _table("graph_bytes", 1 << 30), 1, " GiB"),
)


def report(results: Results) -> str:
    """The markdown page."""
    lines = ["# GPU suite", "", "| stage | status | seconds | in short |", "|---|---|---|---|"]
    for name, one in results.items():
        if not one:
            lines.append(f"| {name} | not run | | |")
            continue
        seconds = f"{one['seconds']:.0f}" if "seconds" in one else ""
        lines.append(f"| {name} | {one['status']} | {seconds} | {_short(one)} |")
    lines += ["", "| target | limit | found | |", "|---|---|---|---|"]
    lines += [target.line(results) for target in TARGETS]
    lines += _floor_table(results)
    return "\n".join(lines) + "\n"


def _short(one: Mapping[str, Any]) -> str:
    """The counts of tests, or the model, or a failure's last line."""
    result = one.get("result", {})
    if one["status"] == "failed" and one.get("output", "").strip():
        return str(one["output"].strip().splitlines()[-1][:120]).replace("|", "/")
    if "counts" in result:
        return ", ".join(f"{count} {name.lower()}" for name, count in result["counts"].items())
    return str(result.get("model", result.get("target", "")))


def _floor_table(results: Results) -> list[str]:
    rows = results.get("floor", {}).get("result", {}).get("rows", {})
    if not rows:
        return []
    lines = ["", "| batch | k | step, ms | floor, ms | over floor | over plain |", "|---" * 6 + "|"]
    for row in rows.values():
        lines.append(
            f"| {row['batch_size']} | {row['k']} | {1e3 * row['seconds']:.3f} "
            f"| {1e3 * row['floor_seconds']:.3f} | {row['over_floor']:.2f} "
            f"| {row['over_plain']['median']:.3f} |"
        )
    return lines
