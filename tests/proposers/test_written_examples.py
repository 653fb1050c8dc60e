"""The proposers that `writing-your-own.md` shows, registered and served with as they stand.

What is shown must be imported, draft, and change no token.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from graphengine.sampling.params import SamplingParams
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Setup
from tests.proposers.helpers import install_entry_point

PAGE = Path(__file__).resolve().parents[2] / "docs" / "proposers" / "writing-your-own.md"
PROMPTS = [[7, 7], [3, 4, 5, 6, 7, 8, 9], [200]]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


def run(checkpoints: Checkpoints, setup: Setup, **options: str) -> tuple[list[list[int]], Harness]:
    harness = Harness(setup.start(checkpoints.get("loopy"), **options))
    for index, prompt in enumerate(PROMPTS):
        harness.add(str(index), prompt, PARAMS)
    harness.drain()
    return [harness.stream(str(index)) for index in range(len(PROMPTS))], harness


@pytest.mark.parametrize("name", ["last-token", "bigram"])
def test_an_example_serves(
    name: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards the page: what it shows is imported as it stands, drafts, and changes no token."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (source,) = (block for block in blocks if f'name = "{name}"' in block)
    module = ModuleType("written_example")
    exec(compile(source, str(PAGE), "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    install_entry_point(monkeypatch, tmp_path, name, f"{module.__name__}:SPEC")
    options = {"self_check": "off"} if name == "bigram" else {}
    streams, harness = run(checkpoints, Setup(k=3), method=name, **options)
    expected, off = run(checkpoints, Setup())
    assert streams == expected
    stats = harness.engine.stats()
    assert stats.num_draft_tokens > 20
    captured = any(key.endswith(":draft") for key in stats.replays)
    assert captured == (name == "bigram")
    for one in (harness, off):
        one.engine.close()
