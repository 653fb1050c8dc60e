"""Nsight Compute's text: units, separators, foreign lines, and the share of a copy's bandwidth."""

import sys
from pathlib import Path

import pytest

from profiles import ncu_table

HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",'
    '"Grid Size","Device","CC","dram__bytes.sum","gpu__time_duration.sum"'
)
UNITS = '"","","","","","","","","","","","byte","ns"'


def _launch(number: int, kernel: str, num_bytes: str, time: str) -> str:
    return (
        f'"{number}","77","python3","host","{kernel}","1","7","(128, 1, 1)","(64, 1, 1)","0",'
        f'"9.0","{num_bytes}","{time}"'
    )


def report(*launches: str, units: str = UNITS) -> str:
    around = ["==PROF== Connected to process 77", "==PROF== Profiling: 3 of 3"]
    return "\n".join([*around, HEADER, units, *launches, "==PROF== Disconnected"]) + "\n"


COPY = _launch(2, "copy_ceiling", "2,000,000", "1,000")  # 2,000 GB/s


def test_bandwidth_is_of_all_launches_and_over_the_copys() -> None:
    """Guards against a mean of ratios, in which a tiny launch counts as much as a long one."""
    text = report(
        _launch(0, "linear(float*, int)", "1000000", "1000"),
        _launch(1, "linear(float*, int)", "1000000", "3000"),
        COPY,
    )
    linear, copy = ncu_table.read_kernels(text)
    assert (linear.name, linear.launches) == ("linear(float*, int)", 2)
    assert (linear.us, linear.total_us, linear.gb_per_s) == (2.0, 4.0, 500.0)
    assert linear.share == 0.25
    assert (copy.gb_per_s, copy.share) == (2000.0, 1.0)


def test_units_are_those_of_the_report() -> None:
    """Guards against microseconds taken for nanoseconds where the report chooses its units."""
    units = UNITS.replace('"byte","ns"', '"Mbyte","us"')
    launches = (_launch(0, "a", "1.5", "3"), _launch(1, "copy_ceiling", "2", "1"))
    first, _ = ncu_table.read_kernels(report(*launches, units=units))
    assert (first.us, first.gb_per_s, first.share) == (3.0, 500.0, 0.25)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("==ERROR== no kernels were profiled\n", "no line with the column 'Kernel Name'"),
        (report(_launch(0, "a", "1", "1")), "no kernel named copy_ceiling.*--ceiling"),
        (report(COPY).replace("dram__bytes.sum", "other"), "lacks the metric dram__bytes.sum"),
        (report(COPY, units=UNITS.replace('"ns"', '"cycle"')), "unit 'cycle' of gpu__time"),
        (report(COPY.replace("2,000,000", "n/a")), "'copy_ceiling' has 'n/a' as its dram__bytes"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, message: str) -> None:
    """Guards against a share of nothing, and zeros where a counter was not allowed."""
    with pytest.raises(ValueError, match=message):
        ncu_table.read_kernels(text)


def test_the_command_prints_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a report that is read and not shown, and a failure with code 0."""
    file = tmp_path / "a.csv"
    file.write_text(report(_launch(0, "linear", "1000000", "1000"), COPY))
    monkeypatch.setattr(sys, "argv", ["ncu_table", str(file)])
    assert ncu_table.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| linear | 1 | 1.0 | 1.0 | 1,000 | 50% |"
    assert len({one.count("|") for one in lines}) == 1
    monkeypatch.setattr(sys, "argv", ["ncu_table", str(tmp_path / "none.csv")])
    assert ncu_table.main() == 2
    assert "ncu_table: " in capsys.readouterr().err
