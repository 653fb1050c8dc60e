"""CaptureConfig: what each field admits, and its TOML form."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from capture.config import CaptureConfig

BAD = [
    ("graph", "cudagraph"),
    ("graph", None),
    ("graph", ["tape"]),
    ("compile", "max-autotune"),
    ("compile", True),
    ("num_reqs", ()),
    ("num_reqs", 4),
    ("num_reqs", "1,2"),
    ("num_reqs", (1, 0)),
    ("num_reqs", (1, -2)),
    ("num_reqs", (1, 2.0)),
    ("num_reqs", (1, "2")),
    ("num_reqs", (True, 2)),
    ("draft_lengths", ()),
    ("draft_lengths", 3),
    ("draft_lengths", (0, -1)),
    ("draft_lengths", (0, 1.5)),
    ("draft_lengths", (False,)),
    ("lazy", 1),
    ("lazy", "yes"),
    ("debug", 0),
    ("debug", None),
    ("memory_budget", 0),
    ("memory_budget", -1),
    ("memory_budget", 1.5),
    ("memory_budget", "2GiB"),
    ("memory_budget", True),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_a_bad_value_is_refused_by_name(field: str, value: Any) -> None:
    """Guards against a typo that capture would silently read as something else."""
    with pytest.raises(ValueError, match=rf"CaptureConfig\.{field}"):
        CaptureConfig(**{field: value})


def test_every_field_has_a_refusal() -> None:
    """Guards against a new field whose values nobody checks."""
    assert {field.name for field in dataclasses.fields(CaptureConfig)} == {name for name, _ in BAD}


@pytest.mark.parametrize(("field", "value"), [("graph", "cudagraph"), ("compile", "fast")])
def test_a_refused_choice_lists_the_allowed_ones(field: str, value: str) -> None:
    with pytest.raises(ValueError, match="allowed are auto") as caught:
        CaptureConfig(**{field: value})  # type: ignore[arg-type]
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("graph", ["auto", "cuda", "compiled", "tape", "eager"])
@pytest.mark.parametrize("mode", ["auto", "native", "inductor", "off"])
def test_every_documented_choice_is_accepted(graph: Any, mode: Any) -> None:
    config = CaptureConfig(graph=graph, compile=mode)
    assert (config.graph, config.compile) == (graph, mode)


def test_ladders_are_sorted_without_doubles() -> None:
    """Guards the bisection of dispatch, which needs ascending ladders."""
    config = CaptureConfig(num_reqs=(8, 1, 8, 2), draft_lengths=(3, 0, 3))
    assert (config.num_reqs, config.draft_lengths) == ((1, 2, 8), (0, 3))


def test_it_is_frozen_hashable_and_keyword_only() -> None:
    """Guards against a configuration that changes after capture read it."""
    config = CaptureConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.graph = "eager"  # type: ignore[misc]
    with pytest.raises(TypeError):
        CaptureConfig("eager")  # type: ignore[misc]
    assert hash(config) == hash(CaptureConfig())


FULL = """
graph = "eager"
num_reqs = [4, 1]
draft_lengths = [0, 3]
compile = "off"
lazy = true
memory_budget = 1_000_000
debug = true
"""


@pytest.mark.parametrize("header", ["", "[capture]", '[model]\nname = "x"\n[capture]'])
def test_toml_reads_every_field(tmp_path: Path, header: str) -> None:
    """Guards against a field that only the constructor knows; the table may share its file."""
    path = tmp_path / "capture.toml"
    path.write_text(header + FULL)
    assert CaptureConfig.from_toml(path) == CaptureConfig(
        graph="eager",
        num_reqs=(1, 4),
        draft_lengths=(0, 3),
        compile="off",
        lazy=True,
        memory_budget=1_000_000,
        debug=True,
    )


def test_empty_toml_is_the_default(tmp_path: Path) -> None:
    path = tmp_path / "capture.toml"
    path.write_text("")
    assert CaptureConfig.from_toml(path) == CaptureConfig()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'grpah = "tape"', "unknown key 'grpah'; known keys: graph, num_reqs"),
        (b'[capture]\ngraph = "tape"\nsizes = [1]', "unknown key 'sizes'"),
        (b'[model]\nname = "x"', "unknown key 'model'"),
        (b"capture = 3", r"\[capture\] is not a table"),
        (b"[[capture]]\nlazy = true", r"\[capture\] is not a table"),
        (b"graph = ", "not valid TOML"),
        (b'graph = "\xff"', "not valid TOML"),
        (b"\xff\xfe", "not valid TOML"),
    ],
)
def test_bad_toml_is_one_clear_error(tmp_path: Path, content: bytes, message: str) -> None:
    """Guards against tracebacks of the parser, and against keys that are read by nobody."""
    path = tmp_path / "capture.toml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        CaptureConfig.from_toml(path)
    assert str(path) in str(caught.value)


def test_bad_values_in_toml_are_refused_as_in_python(tmp_path: Path) -> None:
    path = tmp_path / "capture.toml"
    path.write_text('memory_budget = "2GiB"')
    with pytest.raises(ValueError, match=r"CaptureConfig\.memory_budget='2GiB'"):
        CaptureConfig.from_toml(path)


def test_an_unreadable_file_is_one_clear_error(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.toml", tmp_path):
        with pytest.raises(ValueError, match="cannot be read"):
            CaptureConfig.from_toml(path)
