"""What the commands that serve are made of."""

import ast
from pathlib import Path

import graphengine.cli

MEASURING = {"bench.py", "check_lossless.py", "demo.py"}


def test_only_what_measures_imports_bench() -> None:
    """Guards against serving commands that hang on the measuring code for a helper of theirs."""
    folder = Path(graphengine.cli.__file__).parent
    importers = {
        path.name
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("graphengine.bench")
    }
    assert importers == MEASURING
