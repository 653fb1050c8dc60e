"""Draft cells: every cell of the table as a tape, against the same chain called from Python.

The tape is taken under the capture guards, for two batches and for garbage, so a cell that is
captured syncs with nobody, moves no address and does not follow its data; here its numbers are held
to those of the eager chain, bit for bit, with every buffer that it has to write poisoned before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from capture.shapes import ShapeKey
from capture.tape import TapeGraph
from graphengine.engine import Engine
from graphengine.sampling.params import SamplingParams
from proposers.base import CacheRows, Draft, ProposeInputs, RequestSampling
from proposers.chain import TIER
from proposers.mock import JunkProposer
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Setup
from tests.proposers.held import held

pytestmark = pytest.mark.parity

BLOCK_SIZE = 4


def start(checkpoints: Checkpoints, graph: Any, sampling: str) -> Engine:
    setup = Setup(
        k=4,
        graph=graph,
        debug=graph == "tape",
        max_num_seqs=5,
        num_reqs=(1, 2, 4),
        verification="rejection" if sampling == "probabilistic" else "exact",
    )
    model = str(checkpoints.get())
    return setup.start(model, method="draft_model", model=model, draft_sampling=sampling)


def inputs(num_reqs: int, k: int, *, seed: int) -> ProposeInputs:
    """A ragged batch whose requests own the blocks behind each other's."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 30, num_reqs)
    blocks = np.zeros((num_reqs, 16), dtype=np.int32)
    blocks[:, :10] = 1 + np.arange(num_reqs * 10).reshape(num_reqs, 10)
    allowances = draw.integers(0, k + 1, num_reqs).astype(np.int32)
    allowances[draw.integers(num_reqs)] = k
    return ProposeInputs(
        request_ids=[str(index) for index in range(num_reqs)],
        token_ids=[draw.integers(0, 256, n).astype(np.int32) for n in lengths],
        num_draft_tokens=allowances,
        k=k,
        sampling=[RequestSampling(temperature=n % 3, seed=n) for n in range(num_reqs)],
        cache=CacheRows(block_table=blocks, draft_kv_lens=np.zeros(num_reqs, dtype=np.int32)),
    )


@pytest.mark.parametrize("sampling", ["greedy", "coupled", "probabilistic"])
def test_every_cell_replays_what_its_chain_computes(
    sampling: str, checkpoints: Checkpoints
) -> None:
    """Guards case 12 too: batches shrink and grow from one replay to the next."""
    tape, eager = (start(checkpoints, graph, sampling) for graph in ("tape", "eager"))
    table = tape.runner.manager.table
    assert [key for key in tape.runner.manager.stats.seconds if key.endswith(f":{TIER}")] == [
        str(key) for key in table.draft_cells(TIER)
    ]
    replays = 0
    for turn, num_reqs in enumerate((5, 3, 1, 4, 2, 5)):
        for k in table.draft_lengths[1:]:
            batch = inputs(num_reqs, k, seed=10 * turn + k)
            found: list[Draft] = []
            for engine in (tape, eager):
                assert engine.proposer is not None
                draft = engine.proposer.propose(held(engine, batch))
                draft.validate(batch, engine.resolved.model.vocab_size)
                found.append(draft)
            assert np.array_equal(found[0].token_ids, found[1].token_ids)
            assert (found[0].num_draft_tokens == batch.num_draft_tokens).all()
            if sampling == "probabilistic":
                probs = [draft.probs for draft in found]
                live = torch.arange(k) < torch.from_numpy(batch.num_draft_tokens)[:, None]
                assert torch.equal(probs[0][live], probs[1][live])  # type: ignore[index]
            replays += 1
            stats = tape.runner.manager.stats
            key = table.dispatch(num_reqs, k, TIER)
            assert stats.replays[str(key)] > 0
            assert sum(n for name, n in stats.replays.items() if name.endswith(TIER)) == replays
    assert tape.stats().compile_events_after_warmup == 0
    for engine in (tape, eager):
        engine.close()


def test_a_step_is_one_replay_of_drafts_and_one_of_the_target(checkpoints: Checkpoints) -> None:
    """Guards against chains in pieces: more calls only where a prompt or a gap is filled."""
    model = str(checkpoints.get())
    harness = Harness(Setup(k=3).start(checkpoints.get(), method="draft_model", model=model))
    for index in range(2):
        harness.add(str(index), [8] * (index + 3), SamplingParams(max_tokens=40, ignore_eos=True))
    harness.step()
    before = harness.engine.stats()
    for turn in range(1, 6):
        harness.step()
        stats = harness.engine.stats()
        assert sum(stats.replays.values()) - sum(before.replays.values()) == 2 * turn
        assert stats.eager_fallbacks == before.eager_fallbacks
    harness.engine.close()


def test_replays_do_not_call_the_model(checkpoints: Checkpoints) -> None:
    """Guards a tape that is no tape: with the forward patched to raise, drafts come out alike."""
    engine = start(checkpoints, "tape", "greedy")
    batch = held(engine, inputs(3, 4, seed=1))
    proposer: Any = engine.proposer
    expected = proposer.propose(batch).token_ids
    filled = replace(
        batch.cache,  # type: ignore[type-var]
        draft_kv_lens=np.array([len(ids) - 1 for ids in batch.token_ids], dtype=np.int32),
    )

    def fail(*given: Any) -> None:
        raise AssertionError("the model was called")

    proposer.extend = proposer.step = proposer.logits = fail
    again = ProposeInputs(
        request_ids=batch.request_ids,
        token_ids=batch.token_ids,
        num_draft_tokens=batch.num_draft_tokens,
        k=4,
        sampling=batch.sampling,
        cache=filled,
    )
    assert np.array_equal(proposer.propose(again).token_ids, expected)
    manager = engine.runner.manager
    graphs = [graph for key, graph in manager._graphs.items() if key.tier == TIER]
    assert all(isinstance(graph, TapeGraph) for graph in graphs)
    engine.close()


def test_a_host_proposer_is_refused_by_the_manager_and_counted_by_the_engine(
    checkpoints: Checkpoints,
) -> None:
    """Guards drafts of the host that run unseen, or are captured as a constant."""
    proposer = JunkProposer(vocab_size=264)
    engine = Setup(k=2).start(checkpoints.get(), proposer)
    with pytest.raises(ValueError, match="'mock-junk' is graph_safe=False and cannot be captured"):
        engine.runner.manager.capture_proposer(proposer)
    engine.add_request("a", [1, 2, 3])
    for _ in range(4):
        engine.step()
    stats = engine.stats()
    assert stats.eager_fallbacks["proposer:mock-junk"] == 3  # the first step was the prompt's
    assert not [key for key in stats.replays if ShapeKey(1, 3, TIER).tier in key]
    engine.close()
