"""Seeds (case 19): the same seed gives the same stream in any company, and none gives another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphengine.engine import Engine
from graphengine.sampling.params import SamplingParams
from proposers.mock import RaggedProposer
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Setup
from tests.tiny import VOCAB_SIZE, make_checkpoint

pytestmark = pytest.mark.parity

PROMPT = [3, 4, 5, 3, 4, 5, 3]
SEEDED = SamplingParams(max_tokens=20, temperature=1.0, top_p=0.95, seed=7, ignore_eos=True)
UNSEEDED = replace(SEEDED, seed=None)
SETUP = Setup(k=3, max_num_seqs=8)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("seeds") / "model")


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> list[int]:
    harness = Harness(replace(SETUP, k=0, graph="eager").start(checkpoint))
    harness.add("a", PROMPT, SEEDED)
    harness.drain()
    return harness.stream("a")


COMPANY: dict[str, dict[str, Any]] = {
    "eager": {"graph": "eager"},
    "compiled": {"graph": "compiled"},
    "tape": {},
    "plain": {"k": 0},
    "preempted": {"num_blocks": 24, "budget": 12},
    "torch ops": {"compile": "off"},
}


@pytest.mark.parametrize("name", COMPANY)
def test_a_seeded_stream_is_the_same_in_any_company(
    name: str, checkpoint: Path, alone: list[int]
) -> None:
    """Noise that follows the row, the step, the batch or the graph."""
    setup = replace(SETUP, **COMPANY[name])
    if setup.compile != "native":  # another numerics identity: what it gives alone
        harness = Harness(replace(setup, k=0).start(checkpoint))
        harness.add("a", PROMPT, SEEDED)
        harness.drain()
        alone = harness.stream("a")
    records = {"seeded": [*PROMPT, *alone], "again": [*PROMPT, *alone]}
    proposer = RaggedProposer(vocab_size=VOCAB_SIZE, records=records, seed=1)
    harness = Harness(setup.start(checkpoint, proposer if setup.k else None))
    for index in range(5):  # mates in the rows before it
        harness.add(f"mate-{index}", [index + 1] * (index + 2), replace(UNSEEDED, max_tokens=30))
    harness.step()
    harness.add("seeded", PROMPT, SEEDED)
    harness.add("greedy", PROMPT, replace(SEEDED, temperature=0.0, max_tokens=5))
    harness.step()
    harness.abort("mate-1")
    harness.add("again", PROMPT, SEEDED)
    harness.drain()
    assert harness.stream("seeded") == harness.stream("again") == alone
    if name == "preempted":
        assert sum(request.metrics.num_preemptions for request in harness.requests.values()) > 0


def streams_of(engine: Engine, each: list[SamplingParams]) -> list[tuple[int, ...]]:
    harness = Harness(engine)
    for index, params in enumerate(each):
        harness.add(str(index), PROMPT, params)
    harness.drain()
    return [tuple(harness.stream(str(index))) for index in range(len(each))]


def test_requests_without_a_seed_vary(checkpoint: Path, alone: list[int]) -> None:
    """One noise for all of a batch, or token 0 for those without a seed beside those with one."""
    each = [UNSEEDED, SEEDED] * 4
    first, second = (streams_of(SETUP.start(checkpoint), each) for _ in range(2))
    assert first == second, "an engine's own seed starts the same series"
    assert len(set(first[::2])) == 4
    assert set(first[1::2]) == {tuple(alone)}
    assert all(len(set(stream)) > 3 for stream in first)
    seeded = replace(SETUP.config(), seed=1)
    other = streams_of(Engine(checkpoint, seeded), each)
    assert not set(other[::2]) & set(first[::2])
    assert other[1::2] == first[1::2]


def test_another_seed_is_another_stream(checkpoint: Path) -> None:
    """Words of the seed that the noise does not look at."""
    seeds = [0, 1, 7, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1]
    streams = streams_of(SETUP.start(checkpoint), [replace(SEEDED, seed=seed) for seed in seeds])
    assert len(set(streams)) == len(seeds)
