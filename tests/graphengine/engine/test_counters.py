"""Counters against hand counts: drafted, accepted, emitted (cases 43, 47, 48)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphengine.sampling.params import SamplingParams
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Setup, scripted

K = 4
SETUP = Setup(k=K)
PROMPT = (191, 44, 224)
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def free(checkpoints: Checkpoints) -> list[int]:
    harness = Harness(replace(SETUP, k=0).start(checkpoints.get()))
    harness.add("a", PROMPT, PARAMS)
    harness.drain()
    stats = harness.engine.stats()
    assert (stats.num_steps, stats.num_emitted_tokens, stats.num_drafts) == (20, 20, 0)
    assert stats.mean_acceptance_length == 1.0
    assert stats.acceptance_rate == 0.0
    return harness.stream("a")


def hand_count(accept: int) -> dict[str, object]:
    """One request of 20 tokens: K drafts a step, fewer at the limit, `accept` of them right."""
    left, counts = 20, {"steps": 0, "drafts": 0, "drafted": 0, "accepted": 0}
    per_position = [0] * K
    while left:
        drafted = min(K, left - 1)
        accepted = min(accept, drafted)
        counts["steps"] += 1
        counts["drafts"] += drafted > 0
        counts["drafted"] += drafted
        counts["accepted"] += accepted
        for position in range(accepted):
            per_position[position] += 1
        left -= accepted + 1
    return {**counts, "per_position": tuple(per_position)}


@pytest.mark.parametrize("accept", range(K + 1))
def test_counts_of_a_known_script(accept: int, checkpoints: Checkpoints, free: list[int]) -> None:
    """Drafts counted from the configured maximum, or accepted ones off by one (case 47)."""
    proposer = scripted("exactly", {"a": [*PROMPT, *free]}, accept=accept)
    harness = Harness(SETUP.start(checkpoints.get(), proposer))
    harness.add("a", PROMPT, PARAMS)
    harness.drain()
    expected, stats = hand_count(accept), harness.engine.stats()
    assert stats.num_steps == stats.num_request_steps == expected["steps"]
    assert stats.num_drafts == expected["drafts"]
    assert stats.num_draft_tokens == expected["drafted"] == proposer.num_proposed_tokens
    assert stats.num_accepted_tokens == expected["accepted"]
    assert stats.accepted_per_position == expected["per_position"]
    assert stats.num_emitted_tokens == 20
    assert stats.mean_acceptance_length == 20 / stats.num_steps
    assert stats.num_prefill_tokens == len(PROMPT) - 1
    output = harness.outputs["a"]
    assert output.metrics.num_steps == stats.num_steps
    assert output.metrics.num_drafts == stats.num_drafts
    assert output.metrics.num_draft_tokens == stats.num_draft_tokens
    origins = output.outputs[0].token_origins
    assert origins.count("accepted") == stats.num_accepted_tokens
    assert origins.count("recovered") + origins.count("bonus") == stats.num_steps
    blocks = [
        origins[i : i + accept + 1] for i in range(0, 20 // (accept + 1) * (accept + 1), accept + 1)
    ]
    last = "bonus" if accept == K else "recovered"
    assert all(block == ["accepted"] * accept + [last] for block in blocks[:-1])


def test_tokens_cut_by_a_stop_are_in_no_figure(checkpoints: Checkpoints, free: list[int]) -> None:
    """Six counted where three were emitted (case 47): EOS inside a block of accepted drafts."""
    proposer = scripted("oracle", {"a": [*PROMPT, *free]})
    harness = Harness(SETUP.start(checkpoints.get(), proposer))
    harness.add("a", PROMPT, replace(PARAMS, stop_token_ids=(free[6],)))
    harness.drain()
    stats = harness.engine.stats()
    assert harness.stream("a") == free[:7]
    assert stats.num_emitted_tokens == 7
    assert stats.num_draft_tokens == 2 * K
    assert stats.num_accepted_tokens == K + 2
    assert stats.accepted_per_position == (2, 2, 1, 1)


def test_totals_are_sums_over_requests(checkpoints: Checkpoints) -> None:
    """Totals that drift from the requests' own: ragged drafts, aborts, preemption, empty steps."""
    setup = replace(SETUP, num_blocks=14, max_num_seqs=6)
    harness = Harness(setup.start(checkpoints.get(), scripted("ragged", {}, seed=9)))
    commits = harness.engine.proposer
    for index in range(10):
        harness.add(str(index), [index * 3 + 1] * (1 + 3 * index % 11), PARAMS)
        harness.step()
        if index % 4 == 3:
            harness.abort(str(index - 2))
    harness.drain()
    stats, metrics = harness.engine.stats(), [o.metrics for o in harness.outputs.values()]
    assert stats.num_drafts == sum(m.num_drafts for m in metrics)
    assert stats.num_draft_tokens == sum(m.num_draft_tokens for m in metrics) > 0
    assert stats.num_accepted_tokens == sum(m.num_accepted_tokens for m in metrics)
    assert stats.num_request_steps == sum(m.num_steps for m in metrics)
    assert stats.num_preemptions == sum(m.num_preemptions for m in metrics) > 0
    delivered = sum(len(harness.stream(name)) for name in harness.outputs)
    assert stats.num_emitted_tokens == delivered
    assert stats.num_request_steps == sum(harness.batch_sizes)
    assert stats.num_steps == len(harness.batch_sizes) == sum(stats.replays.values())
    told = sum(len(ids) for commit in commits.commits for ids in commit.token_ids)  # type: ignore[union-attr]
    assert told == delivered


def test_preemptions_count_while_the_request_still_runs(checkpoints: Checkpoints) -> None:
    """A counter that lags until the preempted request has ended."""
    setup = Setup(num_blocks=12, prefix=False)
    harness = Harness(setup.start(checkpoints.get()))
    for index in range(2):
        harness.add(str(index), [index] * 10, replace(PARAMS, max_tokens=30))
    while not any(request.metrics.num_preemptions for request in harness.requests.values()):
        harness.step()
    assert harness.engine.has_unfinished_requests()
    assert harness.engine.stats().num_preemptions == 1
    harness.drain()
