"""After start nothing is compiled, nothing falls back without a name, and memory stays flat.

Case 14: forty prompt lengths, batches of 1 to 16, every draft length, aborts in the middle.
"""

from __future__ import annotations

import gc
import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from graphengine.engine import Engine
from graphengine.sampling.params import SamplingParams
from proposers.base import Draft, ProposeInputs
from proposers.mock import MockProposer
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.setups import Setup
from tests.tiny import VOCAB_SIZE

MAX_NUM_SEQS = 16
K = 6
PROMPT_LENGTHS = range(1, 80, 2)
NAMED = {"prefill", "proposer:mock-echo"}
TIERS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=1.0, seed=1),
    "logprobs": SamplingParams(logprobs=2),
}
SLACK_BYTES = 6 << 20


class Echo(MockProposer):
    """Drafts the newest token again, as often as it may: accepted now and then."""

    name = "mock-echo"

    def __init__(self) -> None:
        super().__init__(vocab_size=VOCAB_SIZE)

    def propose(self, inputs: ProposeInputs) -> Draft:
        rows = [
            np.full(allowance, history[-1], dtype=np.int32)
            for history, allowance in zip(
                inputs.token_ids, inputs.num_draft_tokens.tolist(), strict=True
            )
        ]
        return Draft.from_rows(rows, inputs.k)


def run_everything(engine: Engine, tag: str) -> None:
    """All tiers, one after the other."""
    for tier, params in TIERS.items():
        run_tier(engine, f"{tag}-{tier}", params)


def run_tier(engine: Engine, tag: str, params: SamplingParams) -> None:
    """Batches grow from 1 to 16 and shrink by aborts and ends, at every draft length."""
    draw = random.Random(0)
    lengths = iter([*PROMPT_LENGTHS] * 20)
    params = replace(params, max_tokens=9, ignore_eos=True)
    for limit in range(K + 1):
        engine.draft_limit = limit
        for size in range(1, MAX_NUM_SEQS + 1):
            engine.add_request(
                f"{tag}-{limit}-{size}", [draw.randrange(256)] * next(lengths), params
            )
            engine.step()
            if size % 5 == 0:
                engine.abort(f"{tag}-{limit}-{size - 2}")
        while engine.has_unfinished_requests():
            engine.step()
        batch = [f"{tag}-{limit}-batch-{index}" for index in range(MAX_NUM_SEQS)]
        for request_id in batch:  # all at once, then one fewer each step
            long = replace(params, max_tokens=40, ignore_eos=False)
            engine.add_request(request_id, [draw.randrange(256)] * 2, long)
        for request_id in batch:
            engine.step()
            engine.abort(request_id)
        engine.step()


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("compile_mode", "graph"),
    [
        ("native", "tape"),
        ("native", "compiled"),
        ("inductor", "tape"),
        pytest.param("inductor", "compiled", marks=pytest.mark.slow),
    ],
)
def test_nothing_happens_after_start(
    compile_mode: str, graph: str, checkpoints: Checkpoints
) -> None:
    """A shape or a Python number that recompiles, a batch without a cell, a leak by shape."""
    setup = Setup(
        k=K,
        compile=compile_mode,
        graph=graph,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=128,
        block_size=16,
    )
    engine = setup.start(checkpoints.get(), Echo())
    started = engine.stats()
    assert (started.compile_events > 0) == (compile_mode == "inductor")
    run_everything(engine, "first")
    after_first = resident_bytes()
    run_everything(engine, "second")
    after_second = resident_bytes()
    stats = engine.stats()
    assert stats.compile_events == started.compile_events
    assert stats.compile_events_after_warmup == 0
    assert set(stats.eager_fallbacks) == NAMED
    assert after_second - after_first < SLACK_BYTES
    replayed = {key for key, count in stats.replays.items() if count}
    assert replayed == {str(key) for key in engine.resolved.table}, "a cell was never used"
    assert stats.capture_seconds == started.capture_seconds, "something was captured late"
    assert stats.num_accepted_tokens > 0
    engine.close()
