"""Somebody else's package: built, installed and served with, without a line changed here."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.graphengine.engine.checkpoints import Checkpoints

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "tests" / "third_party"

SERVE = """
import sys
from graphengine import LLM, SamplingParams, SpeculativeConfig

params, prompts = SamplingParams(max_tokens=12, ignore_eos=True), [[7, 7, 7], [9]]
streams = []
drafts = SpeculativeConfig("repeat-last", max_draft_tokens=3, times=2, adaptive=False)
for speculative in ("off", drafts):
    with LLM(sys.argv[1], speculative=speculative, max_num_seqs=2, max_model_len=64) as llm:
        streams.append([one.outputs[0].token_ids for one in llm.generate(prompts, params)])
        stats = llm.stats()
assert streams[0] == streams[1], streams
assert stats.num_draft_tokens > 0 and max(stats.accepted_per_position[2:]) == 0, stats
assert stats.eager_fallbacks["proposer:repeat-last"] > 0, stats
print(f"{stats.num_draft_tokens} drafts by", sys.modules["repeat_last"].__file__)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the package, offline."""
    folder = tmp_path_factory.mktemp("third_party")
    # A copy, since setuptools builds in the sources.
    sources = shutil.copytree(SOURCES, folder / "sources", ignore=shutil.ignore_patterns("__*"))
    assert sorted(path.name for path in sources.iterdir()) == ["pyproject.toml", "repeat_last.py"]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    command += ["--no-index", "--no-deps", "--no-build-isolation", "--target", str(folder / "site")]
    done = subprocess.run([*command, str(sources)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def run(site: Path, code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run code in a process that finds the checkout and the package, and no test."""
    paths = f"import sys; sys.path[:0] = [{str(site)!r}, {str(ROOT)!r}]\n"
    command = [sys.executable, "-c", paths + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=site)


def test_it_serves(site: Path, checkpoints: Checkpoints) -> None:
    """Guards the entry point: a package finds an engine with nothing but its name."""
    done = run(site, SERVE, checkpoints.get())
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith(str(site / "repeat_last.py"))


def test_it_is_listed(site: Path) -> None:
    """Guards a matrix that shows only what is at home here."""
    command = "from graphengine.cli import main; sys.argv[1:] = ['proposers']; main()"
    done = run(site, command)
    assert done.returncode == 0, done.stderr
    row, option = (line for line in done.stdout.splitlines() if "repeat-last" in line)
    assert re.search(r" 1 .* built .* repeats the newest token", row)
    assert re.search(r" times .* 3 ", option)
