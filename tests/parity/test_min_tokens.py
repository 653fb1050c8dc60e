"""min_tokens and penalties inside a block (case 17), where the favourite is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from graphengine.sampling.params import SamplingParams
from proposers.mock import JunkProposer, OracleProposer, RaggedProposer
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Setup
from tests.tiny import EOS_ID, VOCAB_SIZE, make_checkpoint

pytestmark = pytest.mark.parity

PROMPT = [3, 4, 5, 3, 4, 5, 3]
SETUP = Setup(k=4)
# Everything but the end of the text and token 5 is out of question, and the end is the favourite.
STOPPING = SamplingParams(
    max_tokens=30, min_tokens=10, allowed_token_ids=(5, EOS_ID), logit_bias={EOS_ID: 100.0}
)
PENALTIES = {
    "frequency": SamplingParams(max_tokens=40, frequency_penalty=1.5, ignore_eos=True),
    "presence": SamplingParams(max_tokens=40, presence_penalty=1.0, ignore_eos=True),
    "repetition": SamplingParams(max_tokens=40, repetition_penalty=1.3, ignore_eos=True),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("min-tokens") / "model")


def serve(checkpoint: Path, setup: Setup, params: SamplingParams, kind: str = "off") -> list[int]:
    records = {tuple(PROMPT): [] if kind == "off" else serve(checkpoint, setup, params)}
    kinds = {"oracle": OracleProposer, "junk": JunkProposer, "ragged": RaggedProposer}
    proposer = None if kind == "off" else kinds[kind](vocab_size=VOCAB_SIZE, records=records)
    used = replace(setup, k=0) if kind == "off" else setup
    harness = Harness(used.start(checkpoint, proposer))
    harness.add("a", PROMPT, params)
    harness.drain()
    if kind == "oracle":
        assert harness.engine.stats().acceptance_rate == 1.0
    return harness.stream("a")


@pytest.mark.parametrize("kind", ["off", "oracle", "junk", "ragged"])
def test_the_end_comes_right_after_min_tokens(kind: str, checkpoint: Path) -> None:
    """An end banned by steps and not by tokens, or allowed in the middle of a block."""
    assert serve(checkpoint, SETUP, STOPPING, kind) == [5] * 10 + [EOS_ID]


@pytest.mark.parametrize("kind", ["oracle", "junk", "ragged"])
@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_see_every_draft_before_a_row(name: str, kind: str, checkpoint: Path) -> None:
    """A penalty that grows weaker the better the drafts are."""
    params = PENALTIES[name]
    plain = serve(checkpoint, SETUP, params)
    assert serve(checkpoint, SETUP, params, kind) == plain
    without = SamplingParams(max_tokens=40, ignore_eos=True)
    assert serve(checkpoint, SETUP, without) != plain, "the penalty changes nothing here"
