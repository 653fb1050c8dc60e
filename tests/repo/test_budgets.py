"""Size budgets: files, functions, parameter lists, and a docstring in every module."""

from pathlib import Path

import pytest

from tests.repo import rules
from tests.repo.conftest import Plant


def test_everything_is_within_budget(repo_root: Path) -> None:
    """Guards against the slow growth that turns a readable file into one that nobody reads."""
    found = rules.budgets(repo_root)
    assert not found, rules.report(found)


def _function(lines: int, signature: str = "f()", docstring_lines: int = 0) -> str:
    body = [f"def {signature}:"]
    if docstring_lines:
        body += ['    """Doc.', *["    more"] * (docstring_lines - 2), '    """']
    body += ["    x = 1"] * (lines - 1)
    return '"""Doc."""\n' + "\n".join(body) + "\n"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\n", "no module docstring"),
        ('"""Doc."""\n' + "x = 1\n" * 400, "401 lines"),
        (_function(61), "f has 61 lines"),
        (_function(2, "f(a, b, c, d, e, *, f, g, h)"), "f has 8 parameters"),
        (_function(2, "f(a, b, c, d, e, f, *g, **h)"), "f has 8 parameters"),
        (
            '"""D."""\nclass A:\n    def m(self, a, b, c, d, e, f, g, h):\n        pass\n',
            "A.m has 8 parameters",
        ),
        (
            '"""D."""\ndef f():\n    def g(a, b, c, d, e, f, h, i):\n        pass\n',
            "f.g has 8 parameters",
        ),
    ],
)
@pytest.mark.parametrize("top", rules.BUDGETED)
def test_planted_excess_is_found(plant: Plant, top: str, source: str, message: str) -> None:
    """Guards against a budget that no longer fires, in any of the folders that it covers."""
    found = rules.budgets(plant({f"{top}/a.py": source}))
    assert [message in v.message for v in found] == [True], rules.report(found)


@pytest.mark.parametrize(
    "source",
    [
        "",
        '"""Doc.\n\nBudget: one table, better read in one place.\n"""\n' + "x = 1\n" * 400,
        _function(60),
        _function(60, docstring_lines=30),
        _function(2, "f(a, b, c, d, *, e, f, g)"),
        '"""D."""\nclass A:\n    def m(self, a, b, c, d, e, f, g):\n        pass\n',
        '"""D."""\n@app.command()\ndef f(a, b, c, d, e, f, g, h):\n    pass\n',
        '"""D."""\n@triton.jit\ndef f(a, b, c, d, e, f, g, h):\n    pass\n',
    ],
)
def test_what_is_within_budget_is_not_reported(plant: Plant, source: str) -> None:
    """Guards against off-by-one budgets and against counting docstrings or command-line flags or a
    kernel's arguments.
    """
    found = rules.budgets(plant({"capture/a.py": source}))
    assert not found, rules.report(found)
