"""The arrows between the packages: capture <- proposers <- graphengine, none in a function."""

import ast
from pathlib import Path

import pytest

from tests.repo import rules
from tests.repo.conftest import Plant


def test_packages_import_only_downwards(repo_root: Path) -> None:
    """Guards against tying a lower package to a higher one, or the engine to one proposer."""
    found = rules.layering(repo_root)
    assert not found, rules.report(found)


def test_no_import_hides_in_a_function(repo_root: Path) -> None:
    """Guards against import cycles papered over by a local import."""
    found = rules.local_imports(repo_root)
    assert not found, rules.report(found)


def test_the_walk_sees_every_package(repo_root: Path) -> None:
    """Guards against a renamed folder, after which the rules above would check nothing."""
    for package in rules.PACKAGES:
        assert list(rules.python_files(repo_root, (package,))), f"no Python file below {package}/"


KERNEL_USERS = {
    "graphengine/attention/cpu.py",
    "graphengine/cli/app.py",  # the name of the build's error
    "graphengine/draft_ops.py",
    "graphengine/model_runner.py",
    "graphengine/models/native_ops.py",
    "graphengine/native_opset.py",
    "graphengine/numerics.py",
    "graphengine/row_ops.py",
    "graphengine/sampling/cpu.py",
    "graphengine/startup.py",
}


def test_only_what_runs_kernels_imports_them(repo_root: Path) -> None:
    """Guards against sizes, schedules and checks that cannot be read without a compiler."""
    users = {
        path.as_posix()
        for path, _, tree in rules.python_files(repo_root, ("graphengine",))
        for node in ast.walk(tree)
        for module in rules.imported_modules(node, repo_root, path) or ()
        if module.startswith("graphengine.kernels")
    }
    assert {user for user in users if not user.startswith("graphengine/kernels/")} <= KERNEL_USERS


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("capture/a.py", "import proposers"),
        ("capture/a.py", "from proposers.base import Draft"),
        ("capture/a.py", "import torch, graphengine.kv"),
        ("capture/a.py", "if TYPE_CHECKING:\n    from graphengine import LLM"),
        (
            "capture/a.py",
            "def f():\n    import importlib\n    importlib.import_module('graphengine')",
        ),
        ("proposers/a.py", "from graphengine import kv"),
        ("proposers/a.py", "class A:\n    from graphengine.kv import cache"),
        ("graphengine/a.py", "from tests import conftest"),
        ("graphengine/a.py", "import profiles.bench"),
        ("graphengine/a.py", "import proposers.ngram"),
        ("graphengine/a.py", "from proposers import base, ngram"),
        ("graphengine/a.py", "from proposers.ngram import NgramProposer"),
        ("graphengine/a.py", "from proposers.mock import OracleProposer"),
        ("graphengine/sub/a.py", "from ...capture import shapes"),
        ("capture/a.py", "from .. import graphengine"),
    ],
)
def test_planted_upward_import_is_found(plant: Plant, path: str, source: str) -> None:
    """Guards against a layering rule that no longer fires."""
    root = plant({path: source, "proposers/ngram.py": "", "proposers/base.py": ""})
    found = rules.layering(root)
    assert [v.path for v in found] == [path], rules.report(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("capture/a.py", "import torch\nfrom capture.shapes import ShapeKey\nfrom . import shapes"),
        ("proposers/a.py", "from capture import ShapeKey\nfrom .base import Draft"),
        ("graphengine/a.py", "import proposers\nfrom proposers import base, Draft"),
        ("graphengine/sub/a.py", "from ..kv import cache\nfrom proposers.registry import create"),
    ],
)
def test_allowed_import_is_not_reported(plant: Plant, path: str, source: str) -> None:
    """Guards against a rule so wide that people switch it off."""
    root = plant({path: source, "proposers/base.py": "", "capture/shapes.py": ""})
    found = rules.layering(root)
    assert not found, rules.report(found)


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    import torch",
        "class A:\n    def f(self):\n        if self.x:\n            from capture import shapes",
        "async def f():\n    from . import b",
        "def f():\n    def g():\n        import json",
    ],
)
def test_planted_local_import_is_found(plant: Plant, source: str) -> None:
    """Guards against a local-import rule that misses methods, branches or nested functions."""
    assert rules.local_imports(plant({"graphengine/a.py": source}))


def test_optional_dependency_may_be_imported_locally(plant: Plant) -> None:
    """Guards against forbidding what optional dependencies need."""
    source = "def f():\n    import triton.language\n    from flashinfer import page"
    assert not rules.local_imports(plant({"graphengine/a.py": source}))
