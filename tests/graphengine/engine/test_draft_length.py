"""What a policy decides reaches the step, and what became of drafts reaches the policy."""

from __future__ import annotations

import pytest

from graphengine.draft_length.measured import MeasuredLength
from graphengine.draft_length.policy import FixedLength
from graphengine.engine import Engine
from graphengine.sampling.params import SamplingParams
from tests.graphengine.draft_length.simulation import LENGTHS, Table
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.setups import Setup, scripted

PROMPT = [1, 2, 3]
NUM_TOKENS = 150
SETUP = Setup(k=6, max_num_seqs=1, max_model_len=256, draft_lengths=LENGTHS)


def serve(engine: Engine) -> list[int]:
    """Tokens of one request."""
    engine.add_request("a", PROMPT, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs[-1].outputs[0].token_ids


@pytest.fixture(scope="module")
def stream(checkpoints: Checkpoints) -> list[int]:
    return serve(Setup(k=0, max_model_len=256).start(checkpoints.get()))


def start(name: str, stream: list[int], checkpoints: Checkpoints) -> Engine:
    return SETUP.start(checkpoints.get(), scripted(name, {"a": [*PROMPT, *stream]}))


@pytest.mark.parametrize(("name", "least", "most"), [("oracle", 0.9, 1.0), ("junk", 0.0, 0.1)])
def test_an_engine_drafts_where_it_pays(
    name: str, least: float, most: float, stream: list[int], checkpoints: Checkpoints
) -> None:
    """Decisions that do not reach the step: drafts go on being verified, or never are."""
    engine = start(name, stream, checkpoints)
    engine.drafting.length.policy = MeasuredLength(Table(drafts=False), LENGTHS, listens=True)
    assert serve(engine) == stream
    stats = engine.stats()
    assert least <= stats.num_drafts / stats.num_steps <= most


class Listener(FixedLength):
    """Drafts nothing, and listens."""

    def __init__(self) -> None:
        super().__init__(0)
        self.judged: list[tuple[int, int]] = []

    def may_listen(self) -> bool:
        return True

    def observe(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        self.judged.append((num_drafts, num_accepted))


@pytest.mark.parametrize(("name", "accepted"), [("oracle", 6), ("junk", 0)])
def test_drafts_are_judged_though_no_step_verifies_one(
    name: str, accepted: int, stream: list[int], checkpoints: Checkpoints
) -> None:
    """A phase of copying that nobody notices while drafts are off (case 54: plain cells alone)."""
    engine, policy = start(name, stream, checkpoints), Listener()
    engine.drafting.length.policy = policy
    assert serve(engine) == stream
    stats = engine.stats()
    assert stats.num_draft_tokens == 0
    assert {key.split(":")[0] for key in stats.replays} == {"1x1"}
    assert engine.proposer is not None
    assert stats.eager_fallbacks[f"proposer:{engine.proposer.name}"] > 0.9 * NUM_TOKENS
    assert len(policy.judged) > 0.8 * NUM_TOKENS
    assert {judged for judged in policy.judged if judged[0] == 6} == {(6, accepted)}


def test_off_asks_nobody(stream: list[int], checkpoints: Checkpoints) -> None:
    """`draft_limit=0` goes before any policy: nothing is drafted, and nobody listens."""
    engine, policy = start("oracle", stream, checkpoints), Listener()
    engine.drafting.length.policy = policy
    engine.draft_limit = 0
    assert serve(engine) == stream
    assert policy.judged == [(0, 0)] * (NUM_TOKENS - 1)  # the last step ends the request
    assert engine.proposer is not None
    assert f"proposer:{engine.proposer.name}" not in engine.stats().eager_fallbacks
