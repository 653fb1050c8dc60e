"""EAGLE where tokens are sampled: seeded streams as without it; what its drafts are drawn from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from graphengine.bench.distributions import holm
from graphengine.sampling.params import SamplingParams
from proposers.base import Draft, ProposeInputs
from tests.draft_heads import Head, draft_table, make_eagle3, make_echo, write
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Setup
from tests.parity import test_rejection
from tests.parity.test_rejection import ALLOWED, p_values, streams
from tests.tiny import VOCAB_SIZE

pytestmark = pytest.mark.parity

checkpoint, target = test_rejection.checkpoint, test_rejection.target  # the fixtures
TEMPERATURES = (0.0, 0.3, 1.0, 1.7, 4.0)


def run(setup: Setup, target: Path, **options: Any) -> Harness:
    harness = Harness(setup.start(target, **options))
    for index, temperature in enumerate(TEMPERATURES):
        params = SamplingParams(
            max_tokens=30, ignore_eos=True, temperature=temperature, top_p=0.9, seed=index
        )
        harness.add(f"r{index}", [index + 1] * (index + 3), params)
    harness.drain()
    return harness


def check_streams(one: Harness, other: Harness, num_streams: int = len(TEMPERATURES)) -> None:
    for index in range(num_streams):
        assert one.stream(f"r{index}") == other.stream(f"r{index}"), f"at {TEMPERATURES[index]}"
    for harness in (one, other):
        harness.engine.close()


@pytest.mark.parametrize("draft_sampling", ["greedy", "coupled"])
@pytest.mark.parametrize("pair", [("near", "rough"), ("llama", "eagle3")])
def test_seeded_streams_are_those_of_plain_decoding(
    pair: tuple[str, str], draft_sampling: str, checkpoints: Checkpoints
) -> None:
    """Guards the output of sampled requests against whatever a head draws or reads."""
    target, head = map(checkpoints.get, pair)
    options = {"method": "eagle", "model": str(head), "draft_sampling": draft_sampling}
    on = run(Setup(k=3, debug=True), target, **options)
    accepted = on.engine.stats().num_accepted_tokens
    check_streams(on, run(Setup(), target))
    assert accepted > 10 or head.name == "eagle3", "a random head is never right"


def test_coupled_drafts_of_a_small_vocabulary_are_accepted_more_often(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Guards the noise of a column, which is that of the id that it stands for."""
    target, table = checkpoints.get("near"), draft_table(200)
    tensors = make_echo(tmp_path, target, noise=0.05)
    ids = table["d2t"] + torch.arange(200)
    tensors |= table | {"lm_head.weight": tensors["lm_head.weight"][ids]}
    config = json.loads((tmp_path / "config.json").read_text())
    write(tmp_path, config | {"draft_vocab_size": 200}, tensors)
    accepted = []
    for draft_sampling in ("greedy", "coupled"):
        options = {"method": "eagle", "model": str(tmp_path), "draft_sampling": draft_sampling}
        harness = run(Setup(k=3), target, **options)
        accepted.append(harness.engine.stats().acceptance_rate)
        harness.engine.close()
    assert accepted[1] > accepted[0] + 0.05


def test_the_distribution_is_of_the_head_s_vocabulary(checkpoints: Checkpoints) -> None:
    """Guards case 36: q is what drafts were drawn from, and zero where the head has no id."""
    target, head = checkpoints.get("llama"), checkpoints.get("eagle3")
    options = {"method": "eagle", "model": str(head), "draft_sampling": "probabilistic"}
    setup = Setup(k=3, verification="rejection")
    engine = setup.start(target, **options)
    proposer, num_rows = engine.proposer, 0
    assert proposer is not None
    table = proposer._tokens.long()  # type: ignore[attr-defined]
    outside = torch.ones(VOCAB_SIZE, dtype=torch.bool).index_fill(0, table, False)
    propose = proposer.propose

    def spy(inputs: ProposeInputs) -> Draft:
        nonlocal num_rows
        draft = propose(inputs)
        assert draft.probs is not None
        for row, probs, count in zip(
            draft.token_ids, draft.probs, draft.num_draft_tokens, strict=True
        ):
            q = probs[:count]
            assert (q[:, outside] == 0).all()
            torch.testing.assert_close(q.sum(-1), torch.ones(int(count)), atol=1e-5, rtol=0)
            assert (q.gather(1, torch.tensor(row[:count]).long()[:, None]) > 0).all()
            num_rows += int(count)
        return draft

    proposer.propose = spy  # type: ignore[method-assign]
    harness = Harness(engine)
    for index, temperature in enumerate(TEMPERATURES):
        params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=temperature, seed=index)
        harness.add(f"r{index}", [index + 1] * (index + 3), params)
    harness.drain()
    assert num_rows > 100
    off = Harness(Setup().start(target))
    off.add("r0", [1, 1, 1], SamplingParams(max_tokens=20, ignore_eos=True))
    off.drain()
    check_streams(harness, off, 1)  # greedy requests are identical in either mode


def test_tokens_are_distributed_as_without_drafts(
    checkpoint: Path, target: dict[tuple[int, ...], Any], tmp_path: Path
) -> None:
    """Guards rejection with a q that has zeros: a head whose vocabulary is the allowed tokens."""
    ids = torch.tensor(ALLOWED)
    marks = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, ids, True)
    head = Head(draft_vocab=len(ids))
    make_eagle3(tmp_path, head, d2t=ids - torch.arange(len(ids)), t2d=marks)
    setup = Setup(k=2, verification="rejection", max_num_seqs=16)
    options = {"method": "eagle", "model": str(tmp_path), "draft_sampling": "probabilistic"}
    engine = setup.start(checkpoint, **options)
    got = streams(engine)
    stats = engine.stats()
    assert 0.1 < stats.acceptance_rate < 0.9
    engine.close()
    assert min(holm(p_values(got, target))) > 1e-3
