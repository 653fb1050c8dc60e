"""docs/proposers: the matrix is the registry's, and each page says of its proposer what is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from proposers import INTERFACE, ProposerInfo, registry

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "proposers"
SERVED = [info for info in registry.infos() if info.status != "unsupported"]
ROW = re.compile(r"^\| `(\w+)` \| (yes|no)\b", re.MULTILINE)


def matrix() -> str:
    """Both tables of the index, from the registry."""
    lines = ["| method | interface | status | runs | needs | probabilities | what it is |"]
    lines.append("|---" * 7 + "|")
    for info in SERVED:
        needs = ["a checkpoint"] if info.model == "required" else []
        needs += ["hidden states"] if info.needs_hidden_states else []
        cells = (
            f"[`{info.name}`]({info.name}.md)",
            info.interface,
            info.status,
            "captured" if info.graph_safe else f"on the {info.kind}",
            ", ".join(needs),
            "yes" if info.produces_probs else "no",
            info.summary,
        )
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    lines += ["", "| unsupported | what it is | why not | in its place |", "|---" * 4 + "|"]
    for info in registry.infos():
        if info.status == "unsupported":
            instead = ", ".join(f"`{name}`" for name in info.instead)
            lines.append(f"| `{info.name}` | {info.summary} | {info.reason} | {instead} |")
    return "\n".join(lines)


def test_the_index_is_the_registry() -> None:
    """Guards against a matrix that promises what is refused, or hides what is served."""
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    found = "\n".join(line for line in page.splitlines() if line.startswith("|"))
    expected = matrix()
    assert found == expected.replace("\n\n", "\n"), f"the tables should be\n\n{expected}"
    assert f"interface version is {INTERFACE}" in page


def test_every_page_is_in_the_index() -> None:
    """Guards against pages that nobody finds, and links that lead nowhere."""
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    links = set(re.findall(r"\]\(([\w-]+\.md)\)", page))
    assert links == {path.name for path in FOLDER.glob("*.md")} - {"README.md"}


@pytest.mark.parametrize("info", SERVED, ids=lambda info: info.name)
def test_a_page_says_what_the_registry_says(info: ProposerInfo) -> None:
    """Guards against a page that is older than its proposer."""
    page = (FOLDER / f"{info.name}.md").read_text(encoding="utf-8")
    assert f"| name | `{info.name}` |" in page
    said = {flag: answer == "yes" for flag, answer in ROW.findall(page)}
    for flag in ("graph_safe", "needs_hidden_states", "produces_probs"):
        assert said[flag] == getattr(info, flag), flag
    for option in info.options:
        default = f"{option.default:,}" if type(option.default) is int else str(option.default)
        assert re.search(rf"^\| `{option.name}` \| `?{re.escape(default)}`? \|", page, re.MULTILINE)
