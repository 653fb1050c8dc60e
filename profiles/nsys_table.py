"""The table of a step (trace.py) from a file that `nsys export --type sqlite` has made.

Owns the knowledge of that schema: which tables there may be, which columns differ by version, that
names are ids of StringIds, that times are nanoseconds. One profiled process is assumed.

    python -m profiles.nsys_table FILE.sqlite --json FILE.json
"""

from __future__ import annotations

import argparse
import sqlite3
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from graphengine.bench.results_file import check_target, write_json
from profiles.torch_trace import RANGES
from profiles.trace import Event, Kind, call_kind, markdown, tabulate

STRINGS: Final = "StringIds"
RANGES_TABLE: Final = "NVTX_EVENTS"
PUSH_POP: Final = 59  # of eventType: a range of one thread; others are marks, domains, categories
# Calls of the host: the driver's stand among the runtime's, or in a table of older versions.
CALL_TABLES: Final = ("CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_DRIVER")
# A graph is one row in a table of its own, or, with --cuda-graph-trace=node, its kernels are rows.
DEVICE_TABLES: Final[dict[str, Kind]] = {
    "CUPTI_ACTIVITY_KIND_KERNEL": "kernel",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "kernel",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "copy",
    "CUPTI_ACTIVITY_KIND_MEMSET": "copy",
}
_KERNEL_NAMES: Final = ("demangledName", "shortName", "mangledName", "nameId")
Row = Sequence[Any]


def read_events(file: Path) -> list[Event]:
    """All that a table is made of.

    Raises:
        ValueError: no such file, no SQLite file, or none that Nsight Systems has exported.
    """
    if not file.is_file():
        raise ValueError(f"{file}: there is no such file")
    try:
        with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as database:
            return list(_Export(database, file).events())
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{file}: not a SQLite file as nsys exports it ({error})") from error


class _Export:
    """An exported file, with what its version has."""

    def __init__(self, database: sqlite3.Connection, file: Path) -> None:
        self._database = database
        query = "SELECT name FROM sqlite_master WHERE type IN ('table', 'view')"
        self._tables = {name for (name,) in database.execute(query)}
        if STRINGS not in self._tables:
            raise ValueError(
                f"{file}: has no table {STRINGS}, so Nsight Systems has not exported it; make one "
                "with: nsys export --type sqlite REPORT.nsys-rep"
            )
        if RANGES_TABLE not in self._tables:
            raise ValueError(
                f"{file}: has no table {RANGES_TABLE}: profile with -t cuda,nvtx, and with "
                "graphengine.tracing switched on"
            )
        self._strings: dict[int, str] = dict(database.execute(f"SELECT id, value FROM {STRINGS}"))

    def events(self) -> Iterator[Event]:
        """Ranges, calls, and work of the device."""
        for start, end, text, text_id, thread, kind in self._rows(
            RANGES_TABLE, "start", "end", "text", "textId", "globalTid", "eventType"
        ):
            name = text if text is not None else self._strings.get(text_id)
            # A range without an end was still open when profiling stopped.
            if name in RANGES and end is not None and kind in (None, PUSH_POP):
                yield _event(name, start, end, thread, "range")
        for table in CALL_TABLES:
            for start, end, name_id, thread, number in self._rows(
                table, "start", "end", "nameId", "globalTid", "correlationId"
            ):
                name = self._strings.get(name_id, "unknown")
                yield _event(name, start, end, thread, call_kind(name), number)
        for table, work in DEVICE_TABLES.items():
            name_of = self._names(table)
            for start, end, stream, number, graph, *names in self._rows(
                table, "start", "end", "streamId", "correlationId", "graphId", *_KERNEL_NAMES
            ):
                lane = f"stream {stream}"
                yield _event(name_of(graph, names), start, end, lane, work, number)

    def _names(self, table: str) -> Callable[[int | None, Row], str]:
        plain = table.removeprefix("CUPTI_ACTIVITY_KIND_").lower()

        def name(graph: int | None, names: Row) -> str:
            known = (self._strings.get(one) for one in names if one is not None)
            return next(filter(None, known), plain if graph is None else f"{plain} {graph}")

        return name

    def _rows(self, table: str, *columns: str) -> Iterator[Row]:
        """Rows of a table, with None for columns that this version lacks; none without the table.

        Raises:
            ValueError: a table without times.
        """
        if table not in self._tables:
            return
        there = {row[1] for row in self._database.execute(f"PRAGMA table_info({table})")}
        if not {"start", "end"} <= there:
            raise ValueError(f"table {table} has no columns start and end: an unknown version")
        wanted = ", ".join(f'"{one}"' if one in there else "NULL" for one in columns)
        yield from self._database.execute(f'SELECT {wanted} FROM {table} ORDER BY "start"')


def _event(
    name: str, start: int, end: int, lane: object, kind: Kind, number: int | None = None
) -> Event:
    return Event(name, start / 1e3, end / 1e3, str(lane), kind, number)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="as `nsys export --type sqlite` has written it")
    parser.add_argument("--json", type=Path, help="write the table to this file, too")
    return parser.parse_args()


def main() -> int:
    args = parse()
    try:
        if args.json is not None:
            check_target(args.json)
        table = tabulate(read_events(args.file))
    except ValueError as error:
        print(f"nsys_table: {error}", file=sys.stderr)
        return 2
    print(markdown(table))
    if args.json is not None:
        write_json(args.json, {"file": args.file.name, "table": table.as_dict()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
