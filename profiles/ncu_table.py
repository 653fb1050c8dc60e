"""Bandwidth of single kernels, from what `ncu --csv --page raw` prints, over that of a plain copy.

Owns the reading of that text: lines of other programs around it, a line of units below the header,
thousands separators. The ceiling is the copy kernel of copy_ceiling.py, launched in the same run.

    python -m profiles.ncu_table FILE.csv
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Final

NAME: Final = "Kernel Name"
BYTES: Final = "dram__bytes.sum"
TIME: Final = "gpu__time_duration.sum"
CEILING: Final = "copy_ceiling"
# By the unit that the report names: bytes, and microseconds.
_BYTES: Final = MappingProxyType(
    {"byte": 1.0, "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9, "tbyte": 1e12}
)
_MICROSECONDS: Final = MappingProxyType(
    {
        "ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0,
        "ms": 1e3, "msecond": 1e3, "s": 1e6, "second": 1e6,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kernel:
    """All launches of a kernel."""

    name: str
    launches: int
    us: float  # median launch
    total_us: float
    gb_per_s: float  # bytes of device memory over time, of all launches
    share: float  # of the ceiling


def read_kernels(text: str) -> list[Kernel]:
    """The kernels of a report, by the time that they take; the copy itself is one.

    Raises:
        ValueError: no report, a metric or a unit that is not there, or no copy to compare with.
    """
    launches: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for name, num_bytes, us in _launches(text):
        launches[name].append((num_bytes, us))
    copies = [one for name, found in launches.items() if CEILING in name for one in found]
    if not copies:
        raise ValueError(
            f"the report has no kernel named {CEILING}: run profiles.marked_steps with --ceiling"
        )
    ceiling = _bandwidth(copies)
    kernels = [
        Kernel(
            name=name,
            launches=len(found),
            us=median(us for _, us in found),
            total_us=sum(us for _, us in found),
            gb_per_s=_bandwidth(found),
            share=_bandwidth(found) / ceiling,
        )
        for name, found in launches.items()
    ]
    return sorted(kernels, key=lambda one: -one.total_us)


def _bandwidth(launches: Iterable[tuple[float, float]]) -> float:
    found = list(launches)
    us = sum(us for _, us in found)
    return sum(num_bytes for num_bytes, _ in found) / us / 1e3 if us else 0.0


def _launches(text: str) -> list[tuple[str, float, float]]:
    """(kernel, bytes, microseconds) of every launch."""
    rows = list(csv.reader(text.splitlines()))
    start = next((index for index, row in enumerate(rows) if NAME in row), None)
    if start is None or start + 1 >= len(rows):
        raise ValueError(f"no report of ncu: there is no line with the column {NAME!r}")
    header = rows[start]
    for column in (BYTES, TIME):
        if column not in header:
            raise ValueError(f"the report lacks the metric {column}: see profiles/ncu.sh")
    units = dict(zip(header, rows[start + 1], strict=False))
    by_byte, by_time = _factor(units, BYTES, _BYTES), _factor(units, TIME, _MICROSECONDS)
    found = []
    for row in rows[start + 2 :]:
        if len(row) != len(header):
            continue  # what another program has printed
        values = dict(zip(header, row, strict=True))
        num_bytes, us = _number(values, BYTES), _number(values, TIME)
        found.append((values[NAME], num_bytes * by_byte, us * by_time))
    return found


def _factor(units: Mapping[str, str], column: str, known: Mapping[str, float]) -> float:
    unit = units.get(column, "")
    if unit.lower() not in known:
        raise ValueError(f"unit {unit!r} of {column} is not known: expected {', '.join(known)}")
    return known[unit.lower()]


def _number(values: Mapping[str, str], column: str) -> float:
    text = values[column].replace(",", "")
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(
            f"kernel {values[NAME]!r} has {text!r} as its {column}: this GPU cannot count it, or "
            "may not (ERR_NVGPUCTRPERM)"
        ) from error


def markdown(kernels: Sequence[Kernel]) -> str:
    """One line a kernel."""
    lines = [
        "| kernel | launches | median, us | total, us | GB/s | of a copy |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.name.replace('|', ' ')} | {one.launches} | {one.us:.1f} | {one.total_us:,.1f} "
        f"| {one.gb_per_s:,.0f} | {one.share:.0%} |"
        for one in kernels
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="what ncu --csv --page raw has printed")
    args = parser.parse_args()
    try:
        print(markdown(read_kernels(args.file.read_text(encoding="utf-8"))))
    except (OSError, ValueError) as error:
        print(f"ncu_table: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
