"""Nsight Systems exports: the table that they give, what versions differ in, what is refused."""

import json
import sqlite3
import sys
from pathlib import Path

import pytest

from graphengine.tracing import PLAN, VERIFY
from profiles import nsys_table
from profiles.trace import OUTSIDE, Row, tabulate
from tests.profiles import nsys_export


def _rows(file: Path) -> dict[str, Row]:
    table = tabulate(nsys_table.read_events(file))
    assert table.num_steps == 2
    return {row.phase: row for row in (*table.rows, table.total)}


def _without(tables: nsys_export.Tables, table: str, *columns: str) -> None:
    """Take columns out of a table, as a version that does not have them."""
    declared, rows = tables[table]
    kept = [one for one in declared.split(", ") if one.split()[0] not in columns]
    rows = [{name: value for name, value in row.items() if name not in columns} for row in rows]
    tables[table] = (", ".join(kept), rows)


def test_a_step_is_what_the_report_shows(tmp_path: Path) -> None:
    """Guards against marks, open ranges, nested calls and foreign ranges that would be counted."""
    rows = _rows(nsys_export.write(tmp_path / "a.sqlite", nsys_export.two_steps()))
    step, verify, plan = rows["step"], rows[VERIFY], rows[PLAN]
    assert (step.launches, step.graph_launches, step.syncs) == (1, 1, 1)
    assert (step.kernels, step.copies) == (2, 1)
    assert (step.host_us, step.wait_us, step.device_us) == (100, 51, 1 + 10 + 38)
    assert step.idle_us == 100 - 1 - 10 - 38
    assert (plan.copies, plan.host_us) == (1, 8)
    assert (verify.kernels, verify.host_us) == (2, 72)
    assert "emit" not in rows
    assert OUTSIDE not in rows


def test_names_are_found_in_the_strings(tmp_path: Path) -> None:
    """Guards against kernels called by a number, and graphs by nothing."""
    events = nsys_table.read_events(
        nsys_export.write(tmp_path / "a.sqlite", nsys_export.two_steps())
    )
    names = {event.name for event in events if event.kind == "kernel"}
    assert names == {"void linear<float>(float*)", "graph_trace 3"}
    assert {event.name for event in events if event.kind == "copy"} == {"memcpy"}


@pytest.mark.parametrize(
    "table",
    [
        "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
        "CUPTI_ACTIVITY_KIND_KERNEL",
        "CUPTI_ACTIVITY_KIND_MEMCPY",
        "CUPTI_ACTIVITY_KIND_RUNTIME",
    ],
)
def test_tables_are_optional(table: str, tmp_path: Path) -> None:
    """Guards against a report without graphs, or without a device, that cannot be read at all."""
    tables = nsys_export.two_steps()
    del tables[table]
    assert _rows(nsys_export.write(tmp_path / "a.sqlite", tables))["step"].host_us == 100


def test_older_versions_lack_columns(tmp_path: Path) -> None:
    """Guards against a query for a column of this year's version."""
    tables = nsys_export.two_steps()
    for row in tables["NVTX_EVENTS"][1]:
        if row["textId"] is not None:
            row["text"] = nsys_export.STRINGS[row["textId"]]
    _without(tables, "NVTX_EVENTS", "textId", "domainId", "endGlobalTid")
    _without(tables, "CUPTI_ACTIVITY_KIND_KERNEL", "graphNodeId", "demangledName", "globalPid")
    _without(tables, "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", "correlationId", "graphExecId")
    rows = _rows(nsys_export.write(tmp_path / "a.sqlite", tables))
    assert rows[VERIFY].kernels == 1
    assert rows[OUTSIDE].kernels == 1  # the graph: without a number nobody knows who launched it
    assert rows["step"].device_us == 49


def test_the_drivers_calls_may_have_a_table(tmp_path: Path) -> None:
    """Guards against Triton's launches, which are the driver's, that are not counted."""
    tables = nsys_export.two_steps()
    columns, rows = tables["CUPTI_ACTIVITY_KIND_RUNTIME"]
    driver = [{**row, "start": row["start"] + 50_000, "end": row["end"] + 50_000} for row in rows]
    tables["CUPTI_ACTIVITY_KIND_DRIVER"] = (
        columns, [row for row in driver if row["nameId"] == 8],
    )  # fmt: skip
    assert _rows(nsys_export.write(tmp_path / "a.sqlite", tables))["step"].launches == 2


def test_kernels_of_a_graph_by_node(tmp_path: Path) -> None:
    """Guards against kernels of --cuda-graph-trace=node that belong to no phase."""
    tables = nsys_export.two_steps()
    _, graphs = tables.pop("CUPTI_ACTIVITY_KIND_GRAPH_TRACE")
    kernels = tables["CUPTI_ACTIVITY_KIND_KERNEL"][1]
    for graph in graphs:
        for node in range(3):
            start = graph["start"] + 5_000 * node
            kernels.append(
                {
                    **kernels[0], "start": start, "end": start + 4_000,
                    "correlationId": graph["correlationId"], "graphNodeId": node,
                }
            )  # fmt: skip
    rows = _rows(nsys_export.write(tmp_path / "a.sqlite", tables))
    assert (rows[VERIFY].kernels, rows[VERIFY].device_us) == (4, 22)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    """Guards against a stack trace for a wrong path, a report that was not exported, a stranger."""
    with pytest.raises(ValueError, match="there is no such file"):
        nsys_table.read_events(tmp_path / "none.sqlite")
    report = tmp_path / "a.nsys-rep"
    report.write_bytes(b"not a database" * 100)
    with pytest.raises(ValueError, match="not a SQLite file as nsys exports it"):
        nsys_table.read_events(report)
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE people (name TEXT)")
    with pytest.raises(ValueError, match=r"no table StringIds.*nsys export --type sqlite"):
        nsys_table.read_events(other)
    tables = nsys_export.two_steps()
    del tables["NVTX_EVENTS"]
    with pytest.raises(ValueError, match="no table NVTX_EVENTS: profile with -t cuda,nvtx"):
        nsys_table.read_events(nsys_export.write(tmp_path / "untraced.sqlite", tables))
    tables = nsys_export.two_steps()
    tables["CUPTI_ACTIVITY_KIND_MEMCPY"] = ("timestamp INTEGER", [])
    with pytest.raises(ValueError, match="no columns start and end: an unknown version"):
        nsys_table.read_events(nsys_export.write(tmp_path / "future.sqlite", tables))


def test_the_command_prints_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a table on the screen that the file does not have, and a silent failure."""
    file, out = tmp_path / "a.sqlite", tmp_path / "a.json"
    nsys_export.write(file, nsys_export.two_steps())
    monkeypatch.setattr(sys, "argv", ["nsys_table", str(file), "--json", str(out)])
    assert nsys_table.main() == 0
    assert "| verify | 1 | 1 |" in capsys.readouterr().out
    assert json.loads(out.read_text())["table"]["total"]["graph_launches"] == 1
    monkeypatch.setattr(sys, "argv", ["nsys_table", str(tmp_path / "none")])
    assert nsys_table.main() == 2
    assert capsys.readouterr().err.startswith("nsys_table: ")
