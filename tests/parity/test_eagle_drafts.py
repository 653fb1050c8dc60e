"""EAGLE's drafts are a function of the history: no chunk, cached prefix, gap or batch mate in them.

Each draft of a run is compared, bit for bit, with what an engine that has never seen anything gives
for the same tokens as a prompt, in one chunk. Rows of draft KV and hidden states that are not valid
hold NaN before every step (`draft_watch.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from graphengine.sampling.params import SamplingParams
from proposers.base import Draft, ProposeInputs
from proposers.eagle import EagleProposer
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Setup
from tests.parity.test_self_draft import EDGES, check_all_accepted, params, random_jobs

pytestmark = pytest.mark.parity

K = 3
PAIRS = {"rough": "near", "eagle3": "llama"}  # head -> target
Drafts = dict[tuple[int, ...], list[int]]


def start(checkpoints: Checkpoints, head: str, setup: Setup, **options: Any) -> Harness:
    target = checkpoints.get(PAIRS.get(head, "near"))
    model = str(checkpoints.get(head))
    return Harness(setup.start(target, method="eagle", model=model, **options))


def watch(harness: Harness) -> Drafts:
    """Have the drafts of every history written down, and held to each other."""
    proposer, found = harness.engine.proposer, Drafts()
    assert isinstance(proposer, EagleProposer)
    propose = proposer.propose

    def spy(inputs: ProposeInputs) -> Draft:
        draft = propose(inputs)
        for history, row, count in zip(
            inputs.token_ids, draft.token_ids, draft.num_draft_tokens, strict=True
        ):
            key, drafts = tuple(history.tolist()), row[:count].tolist()
            longer = max(found.get(key, []), drafts, key=len)
            assert found.get(key, longer) == longer[: len(found.get(key, longer))]
            assert drafts == longer[: len(drafts)]
            found[key] = longer
        return draft

    proposer.propose = spy  # type: ignore[method-assign]
    return found


class Fresh:
    """What an engine gives for a history that it has never seen a part of."""

    def __init__(self, checkpoints: Checkpoints, head: str, dtype: str) -> None:
        setup = Setup(k=K, dtype=dtype, prefix=False, max_num_seqs=1, max_model_len=128)
        self._harness = start(checkpoints, head, setup)
        self._engine = self._harness.engine
        self._drafts = watch(self._harness)

    def check(self, drafts: Drafts, least: int) -> None:
        """Compare all of them, of which there are at least so many."""
        compared = 0
        for history, wanted in drafts.items():
            if not wanted:
                continue
            if history not in self._drafts:
                self._harness.add("fresh", history, params(K + 1))
                while history not in self._drafts:
                    self._engine.step()
                self._engine.abort("fresh")
                self._engine.step()
            assert self._drafts[history][: len(wanted)] == wanted, f"after {len(history)}"
            compared += len(wanted)
        assert compared >= least


@pytest.fixture(scope="module", params=[("rough", "float32"), ("eagle3", "bfloat16")])
def pair(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def fresh(pair: tuple[str, str], checkpoints: Checkpoints) -> Iterator[Fresh]:
    """One for all tests of a head and dtype: what it has given before is not asked again."""
    made = Fresh(checkpoints, *pair)
    yield made
    made._harness.engine.close()


def serve(
    checkpoints: Checkpoints, pair: tuple[str, str], setup: Setup, prompts: Sequence[list[int]]
) -> tuple[Harness, Drafts]:
    harness = start(checkpoints, pair[0], setup)
    drafts = watch(harness)
    for index, prompt in enumerate(prompts):
        harness.add(f"r{index}", prompt, params(16, index))
        if not setup.prefix:
            continue
        harness.drain()  # one behind the other, so that each finds what was before it
    harness.drain()
    return harness, drafts


@pytest.mark.parametrize("budget", [4, 5, 13])
def test_chunks(budget: int, pair: tuple[str, str], fresh: Fresh, checkpoints: Checkpoints) -> None:
    """Guards case 32: at a chunk's end the next token is the prompt's, not a guess."""
    setup = Setup(k=K, dtype=pair[1], budget=budget, prefix=False)
    prompts = [list(range(1, 1 + length)) for length in (13, 30, 9)]
    harness, drafts = serve(checkpoints, pair, setup, prompts)
    fresh.check(drafts, 20)
    harness.engine.close()


def test_prefix_hits(pair: tuple[str, str], fresh: Fresh, checkpoints: Checkpoints) -> None:
    """Guards rows of a cached block, and the one at its edge, which depends on the token behind."""
    stem = list(range(40, 53))
    prompts = [stem, stem, [*stem[:8], 7, 7, 7], [*stem[:8], 9], [*stem, 1, 2, 3], stem[:9]]
    setup = Setup(k=K, dtype=pair[1])
    harness, drafts = serve(checkpoints, pair, setup, prompts)
    fresh.check(drafts, 100)
    # The second block of 4 was cached with another token behind it: its last row is another.
    hits = [harness.requests[f"r{i}"].metrics.num_cached_tokens for i in range(len(prompts))]
    assert hits == [0, 12, 4, 4, 12, 8]
    harness.engine.close()


@pytest.mark.parametrize("schedule", [(3, 3, 0, 0, 0, 3, 3), (3, *[0] * 20, 3, 1, 3, 0, 2)])
def test_pauses(
    schedule: tuple[int, ...], pair: tuple[str, str], fresh: Fresh, checkpoints: Checkpoints
) -> None:
    """Guards case 37: hidden states of steps without drafts are there when they are needed."""
    harness = start(checkpoints, pair[0], Setup(k=K, dtype=pair[1], max_model_len=128))
    drafts = watch(harness)
    for index in range(4):
        harness.add(f"r{index}", [index + 1] * (index + 1), params(40, index))
    for turn in range(200):
        harness.engine.draft_limit = schedule[turn % len(schedule)]
        if harness.engine.has_unfinished_requests():
            harness.step()
    fresh.check(drafts, 40)
    harness.engine.close()


def test_preemption_and_company(
    pair: tuple[str, str], fresh: Fresh, checkpoints: Checkpoints
) -> None:
    """Guards rows that were given up and computed anew, in batches with padding."""
    setup = Setup(k=K, dtype=pair[1], max_num_seqs=6, num_blocks=26, budget=40, num_reqs=(1, 4))
    harness = start(checkpoints, pair[0], setup)
    drafts = watch(harness)
    harness.run(random_jobs(1, 12, 20))
    fresh.check(drafts, 150)
    assert harness.engine.stats().num_preemptions > 0
    harness.engine.close()


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_a_perfect_head_is_always_right(k: int, checkpoints: Checkpoints) -> None:
    """Guards case 34: an acceptance below 100 % is a slip in token, position or slot."""
    setup = Setup(k=k, max_num_seqs=6, num_blocks=34, budget=40, debug=True)
    harness = start(checkpoints, "echo", setup)
    for index in range(24):  # prompts long enough that attention does not reach token 0
        length = 8 + EDGES[index % len(EDGES)]
        harness.add(f"r{index}", [(7 * i + index) % 256 for i in range(length)], params(20, index))
    harness.drain()
    check_all_accepted(harness, 200)
    assert harness.engine.stats().num_preemptions > 0
    harness.engine.close()


@pytest.mark.parametrize(
    ("graph", "compile_mode"),
    [
        ("tape", "native"),
        ("compiled", "native"),
        ("eager", "off"),
        ("tape", "off"),
        pytest.param("tape", "inductor", marks=pytest.mark.slow),  # half a minute of compilation
    ],
)
def test_launchers_and_pieces(graph: Any, compile_mode: Any, checkpoints: Checkpoints) -> None:
    """Guards a norm in place that is compiled late, or as if its tensors were two."""
    setup = Setup(k=2, graph=graph, compile=compile_mode, debug=True, max_num_seqs=3)
    off = Harness(Setup(compile=compile_mode, max_num_seqs=3).start(checkpoints.get("llama")))
    harness = start(checkpoints, "eagle3", setup)
    for one in (harness, off):
        for index in range(3):
            one.add(f"r{index}", [index + 1] * (3 + index), SamplingParams(max_tokens=12))
        one.drain()
    assert all(harness.stream(f"r{i}") == off.stream(f"r{i}") for i in range(3))
    assert harness.engine.stats().num_draft_tokens > 40
    assert harness.engine.stats().compile_events_after_warmup == 0
    for one in (harness, off):
        one.engine.close()
