"""The capture contract, cell by cell: for each graph-safe proposer, target and chain alike.

A tape in debug mode was taken under the guards, for two batches and for garbage; its replays check
addresses, and find NaN in whatever they should not read. Here each one is held, bit for bit, to the
same step called from Python, over every cell of the table: batches that shrink and grow, ragged
drafts, all tiers. The harness puts NaN in all KV that nobody owns and checks padding and slots.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from capture.config import CaptureConfig
from capture.graph import CompiledGraph
from capture.manager import OVER_BUDGET
from capture.shapes import ShapeKey
from graphengine.config import CacheConfig, EngineConfig
from graphengine.engine import Engine
from graphengine.kv.manager import KVManager
from graphengine.model_runner import tier_of
from graphengine.sampling.params import SamplingParams
from graphengine.speculative_config import SpeculativeConfig
from proposers.mock import JunkProposer
from proposers.mock_models import MockModelProposer
from tests.graphengine.engine.harness import Harness
from tests.parity.capture_twin import CaptureTwin
from tests.tiny import VOCAB_SIZE

pytestmark = pytest.mark.parity

WEIGHTS = Path(__file__).parents[1] / "weights" / "tiny"
K = 3
SHRINKING = (8, 7, 3, 1, 4, 2)
LONG = {"max_tokens": None, "ignore_eos": True}
TIERS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{}],
    "sampled": [{}, {"temperature": 0.8, "seed": 1}, {"temperature": 1.3, "repetition_penalty": 2}],
    "logprobs": [{}, {"temperature": 0.9, "seed": 3}, {"presence_penalty": 1.0}, {"logprobs": 2}],
}
TRAINED = {
    "draft_model": {"method": "draft_model", "model": WEIGHTS / "draft_model"},
    "eagle1": {"method": "eagle", "model": WEIGHTS / "eagle1"},
    "eagle3": {"method": "eagle", "model": WEIGHTS / "eagle3"},
    "mtp": {"method": "mtp", "model": WEIGHTS / "mtp"},
}


def start(
    options: dict[str, Any] | None, *, max_model_len: int = 192, debug: bool = True, **capture: Any
) -> Engine:
    """The tiny target with what drafts for it; None: nothing."""
    speculative = None
    if options is not None:
        rejects = options.get("draft_sampling") == "probabilistic"
        verification = "rejection" if rejects else "exact"
        more = {"self_check": "off"} if "model" in options else {}
        speculative = SpeculativeConfig(
            max_draft_tokens=K, verification=verification, adaptive=False, **more, **options
        )
    capture = {"num_reqs": (1, 2, 4), "debug": debug, **capture}
    return Engine(
        WEIGHTS / "target",
        EngineConfig(
            max_model_len=max_model_len,
            max_num_seqs=8,
            numerics="fast",  # the probe's business is elsewhere
            speculative=speculative,
            capture=CaptureConfig(graph="tape", **capture),
            cache=CacheConfig(block_size=8, num_blocks=max_model_len + 1),
        ),
    )


class Bench:
    """A harness that goes from one batch size to the next, with drafts cut at random."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.twin = CaptureTwin(engine)
        self.harness = Harness(engine)
        self._draw = random.Random(0)
        self._number = 0
        reserve = KVManager.reserve_speculative

        def reserve_some(kv: KVManager, request: Any, draft_rows: int) -> int:
            """As from a pool that is nearly dry: the first gets all, another anything or none."""
            if request is not self.engine.scheduler.running[0]:
                draft_rows = self._draw.randint(0, draft_rows)
            return reserve(kv, request, draft_rows)

        monkeypatch.setattr(KVManager, "reserve_speculative", reserve_some)

    def resize(self, num_reqs: int, tier: str) -> None:
        """Abort the youngest, or add requests and prefill them; the batch needs the tier."""
        scheduler = self.engine.scheduler
        for request in list(scheduler.running)[num_reqs:]:
            self.harness.abort(request.request_id)
        while len(found := [*scheduler.running, *scheduler.waiting]) < num_reqs:
            name, choices = str(self._number), TIERS[tier]
            given = choices[self._number % len(choices)] if tier_of(found) == tier else choices[-1]
            prompt = [self._draw.randrange(256) for _ in range(self._draw.randint(1, 40))]
            self.harness.add(name, prompt, SamplingParams(**{**LONG, **given}))
            self._number += 1
        self.harness.step()

    def sweep(self, tier: str, lengths: Sequence[int] = range(K, -1, -1)) -> None:
        """Every cell of a tier: all sizes, all draft lengths, ragged."""
        self.resize(0, tier)
        for k in lengths:
            self.engine.draft_limit = k
            for num_reqs in SHRINKING:
                self.resize(num_reqs, tier)
                self.harness.step()

    def check(self, tiers: Sequence[str]) -> None:
        """Nothing was left out, and nothing ran beside its cell."""
        table, stats = self.engine.resolved.table, self.engine.stats()
        wanted = {key for key in table if key.tier in tiers}
        if "draft" in tiers:
            wanted |= set(table.draft_cells("draft"))
        missed = [str(key) for key in wanted if not self.twin.replays[key]]
        assert not missed
        ragged = {str(key) for key in self.twin.ragged if key.num_reqs == 8}
        assert ragged == {f"8x{k + 1}:{tier}" for k in range(1, K + 1) for tier in tiers[:-1]}
        assert {name for name in stats.eager_fallbacks if ":" not in name} <= {"prefill"}
        self.engine.close()


# Every pair, of which the fast run has these, with the tiers to go through.
FAST = {
    ("draft_model", "greedy"): ("greedy", "logprobs"),
    ("eagle1", "coupled"): ("sampled",),
    ("eagle3", "probabilistic"): ("sampled",),
    ("mtp", "coupled"): ("greedy",),
}
PAIRS = [
    pytest.param(name, sampling, marks=() if (name, sampling) in FAST else pytest.mark.slow)
    for name in TRAINED
    for sampling in ("greedy", "coupled", "probabilistic")
]


@pytest.mark.parametrize(("name", "sampling"), PAIRS)
def test_every_cell_replays_what_its_step_computes(
    name: str, sampling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that syncs, moves, branches, or keeps a row of an earlier batch (cases 10, 12, 15)."""
    bench = Bench(start({**TRAINED[name], "draft_sampling": sampling}), monkeypatch)
    tiers = FAST.get((name, sampling), tuple(TIERS))
    for tier in tiers:
        bench.sweep(tier)
    bench.check([*tiers, "draft"])


@pytest.mark.parametrize(
    ("method", "more"),
    [("mock-draft-model", {}), ("mock-eagle", {}), ("mock-mtp", {"num_layers": 2})],
)
def test_the_stand_ins_keep_the_contract_of_their_originals(
    method: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in whose chain is captured otherwise, so that it would hide a broken step."""
    bench = Bench(start({"method": method, "records": {}, **more}), monkeypatch)
    proposer = bench.engine.proposer
    assert isinstance(proposer, MockModelProposer)
    proposer.script = JunkProposer(vocab_size=VOCAB_SIZE)
    bench.sweep("greedy")
    bench.check(["greedy", "draft"])


def test_from_an_uncaptured_cell_back_to_a_captured_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that a batch too large to be captured leaves behind (case 12): eager, then 8.

    Lazy cells: those used first are captured, and the budget is used up when the widest comes.
    """
    bench = Bench(start(TRAINED["eagle3"], lazy=True), monkeypatch)
    manager = bench.engine.runner.manager
    bench.sweep("greedy", lengths=(1,))
    assert bench.twin.replays[ShapeKey(8, 2, "greedy")]
    used = sum(manager.stats.num_bytes.values())
    monkeypatch.setattr(
        manager,
        "config",
        CaptureConfig(
            graph="tape", debug=True, lazy=True, memory_budget=manager.buffers.num_bytes + used
        ),
    )
    for k in (3, 1, 3, 1):
        bench.engine.draft_limit = k
        bench.resize(8, "greedy")
        before = bench.engine.stats().eager_fallbacks[OVER_BUDGET]
        bench.harness.step()
        bench.harness.step()
        ran_eager = bench.engine.stats().eager_fallbacks[OVER_BUDGET] - before
        assert (ran_eager > 0) == (k == 3)
    bench.engine.close()


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        ("another cell", "of 2x2:greedy differs from eager"),
        ("no tape", "a replay has called forward"),
    ],
)
def test_the_twin_finds_what_is_no_replay_of_its_cell(
    plant: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proof that proves nothing. Also a graph replayed for another batch (case 15)."""
    bench = Bench(start({"method": "ngram"}), monkeypatch)
    manager, key = bench.engine.runner.manager, ShapeKey(2, 2, "greedy")
    bench.engine.draft_limit = 1
    bench.resize(2, "greedy")
    bench.harness.step()
    graphs, step = manager._graphs, manager._tiers[key.tier].step
    graphs[key] = {
        "another cell": graphs[ShapeKey(1, 2, "greedy")],
        "no tape": CompiledGraph(step, manager.buffers, key),
    }[plant]
    with pytest.raises(AssertionError, match=message):
        bench.harness.drain()
