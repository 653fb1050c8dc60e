"""A small database with the tables and columns of an Nsight Systems export, for tests."""

import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from graphengine.tracing import PLAN, STEP, VERIFY

THREAD = (4242 << 24) + 17  # process and thread in one number, as globalTid has them
PROCESS = 4242 << 24
STRINGS = {
    1: "cudaLaunchKernel_v7000", 2: "cudaGraphLaunch_v10000", 3: "cudaMemcpyAsync_v3020",
    4: "cudaStreamSynchronize_v3020", 5: "void linear<float>(float*)", 6: "linear", 7: VERIFY,
    8: "cuLaunchKernel",
}  # fmt: skip
SCHEMA = {
    "StringIds": "id INTEGER PRIMARY KEY, value TEXT NOT NULL",
    "NVTX_EVENTS": (
        "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, "
        "category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, "
        "textId INTEGER, domainId INTEGER"
    ),
    "CUPTI_ACTIVITY_KIND_RUNTIME": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, "
        "globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, "
        "returnValue INTEGER NOT NULL, callchainId INTEGER"
    ),
    "CUPTI_ACTIVITY_KIND_KERNEL": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, "
        "contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, "
        "globalPid INTEGER, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, "
        "graphNodeId INTEGER"
    ),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, "
        "contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, "
        "globalPid INTEGER, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL"
    ),
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, "
        "graphId INTEGER NOT NULL, graphExecId INTEGER NOT NULL, contextId INTEGER NOT NULL, "
        "streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER"
    ),
}
Tables = dict[str, tuple[str, list[dict[str, Any]]]]


def write(file: Path, tables: Tables) -> Path:
    """A database of these tables: name -> (columns, rows)."""
    with closing(sqlite3.connect(file)) as database, database:
        for name, (columns, rows) in tables.items():
            database.execute(f"CREATE TABLE {name} ({columns})")
            for row in rows:
                names, marks = ", ".join(f'"{one}"' for one in row), ", ".join("?" * len(row))
                query = f"INSERT INTO {name} ({names}) VALUES ({marks})"
                database.execute(query, list(row.values()))
    return file


def two_steps() -> Tables:
    """Two steps of 100 us: an input copied in plan, a kernel and a graph launched, a wait."""
    tables: Tables = {name: (columns, []) for name, columns in SCHEMA.items()}
    tables["StringIds"][1].extend({"id": key, "value": text} for key, text in STRINGS.items())
    for number, start in enumerate((1_000_000, 1_150_000)):
        _step(tables, start, 10 * number)
    _ranges(tables, 1_300_000, [("step", 0, None, None, 59)])  # open when profiling stopped
    return tables


def _step(tables: Tables, at: int, first: int) -> None:
    ranges: list[Sequence[Any]] = [
        (STEP, 0, 100_000, None, 59),
        (None, 10_000, 90_000, 7, 59),  # verify, its text among the strings
        (PLAN, 12_000, 20_000, None, 59),
        ("emit", 30_000, 30_000, None, 34),  # a mark that is called like a phase
        ("somebody else's", 0, 100_000, None, 59),
    ]
    _ranges(tables, at, ranges)
    calls = [
        (13_000, 15_000, 3, first + 1),
        (22_000, 25_000, 1, first + 2),
        (23_000, 24_000, 8, first + 2),  # the driver's call inside the runtime's
        (26_000, 28_000, 2, first + 3),
        (29_000, 80_000, 4, first + 4),
    ]
    for start, end, name, number in calls:
        tables["CUPTI_ACTIVITY_KIND_RUNTIME"][1].append(
            {
                "start": at + start, "end": at + end, "eventClass": 0, "globalTid": THREAD,
                "correlationId": number, "nameId": name, "returnValue": 0,
            }
        )  # fmt: skip
    place = {"deviceId": 0, "contextId": 1, "streamId": 7, "globalPid": PROCESS}
    tables["CUPTI_ACTIVITY_KIND_MEMCPY"][1].append(
        {
            "start": at + 16_000, "end": at + 17_000, "correlationId": first + 1,
            "bytes": 64, "copyKind": 1, **place,
        }
    )  # fmt: skip
    tables["CUPTI_ACTIVITY_KIND_KERNEL"][1].append(
        {
            "start": at + 30_000, "end": at + 40_000, "correlationId": first + 2,
            "demangledName": 5, "shortName": 6, **place,
        }
    )  # fmt: skip
    tables["CUPTI_ACTIVITY_KIND_GRAPH_TRACE"][1].append(
        {
            "start": at + 41_000, "end": at + 79_000, "correlationId": first + 3,
            "graphId": 3, "graphExecId": 4, **place,
        }
    )  # fmt: skip


def _ranges(tables: Tables, at: int, ranges: Iterable[Sequence[Any]]) -> None:
    for text, start, end, text_id, kind in ranges:
        tables["NVTX_EVENTS"][1].append(
            {
                "start": at + start, "end": None if end is None else at + end, "eventType": kind,
                "text": text, "textId": text_id, "globalTid": THREAD, "domainId": 0,
            }
        )  # fmt: skip
