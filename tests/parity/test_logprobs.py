"""Log-probabilities against transformers: the final text, read by the reference, gives the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from graphengine.sampling.params import SamplingParams
from proposers.base import Proposer
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Setup, scripted
from tests.tiny import make_checkpoint, make_model

pytestmark = pytest.mark.parity

PROMPTS = ([3, 4, 5, 3, 4, 5, 3], [9] * 12, [200, 1])
REQUESTS = (
    SamplingParams(max_tokens=24, logprobs=5, ignore_eos=True),
    SamplingParams(max_tokens=24, logprobs=0, temperature=0.9, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=24, logprobs=20, repetition_penalty=1.4, ignore_eos=True),
)
SETUP = Setup(k=4, max_model_len=64)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("logprobs") / "model")


def serve(checkpoint: Path, setup: Setup, proposer: Proposer | None = None) -> Harness:
    harness = Harness(setup.start(checkpoint, proposer))
    for index, (prompt, params) in enumerate(zip(PROMPTS, REQUESTS, strict=True)):
        harness.add(str(index), prompt, params)
    harness.drain()
    return harness


def test_every_emitted_token_on_and_off(checkpoint: Path) -> None:
    """Processed logits given out for the model's own, or a row's numbers for its neighbour's."""
    off = serve(checkpoint, replace(SETUP, k=0))
    records = {str(i): [*prompt, *off.stream(str(i))] for i, prompt in enumerate(PROMPTS)}
    oracle = serve(checkpoint, SETUP, scripted("oracle", records))  # type: ignore[arg-type]
    ragged = serve(checkpoint, SETUP, scripted("ragged", records))  # type: ignore[arg-type]
    model = make_model("llama").eval()
    for index, (prompt, params) in enumerate(zip(PROMPTS, REQUESTS, strict=True)):
        name = str(index)
        ids = off.stream(name)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.double().log_softmax(-1)
        for harness in (off, oracle, ragged):
            answer = harness.outputs[name].outputs[0]
            assert answer.token_ids == ids
            assert answer.logprobs is not None
            total = 0.0
            for position, (token, entry) in enumerate(zip(ids, answer.logprobs, strict=True)):
                row = expected[position]
                for other, found in entry.items():
                    assert found.logprob == pytest.approx(float(row[other]), abs=1e-4)
                likeliest = row.topk(params.logprobs or 1).indices.tolist()
                assert not params.logprobs or set(entry) == {*likeliest, token}
                assert entry[token].rank == int((row > row[token]).sum()) + 1
                total += entry[token].logprob
            assert answer.cumulative_logprob == pytest.approx(total)


def test_a_greedy_stream_is_the_same_beside_one_with_logprobs(checkpoint: Path) -> None:
    """A tier whose argmax differs: batch mates decide which one a request gets."""
    plain = replace(REQUESTS[0], logprobs=None)
    streams = []
    for mate in (None, REQUESTS[1], replace(REQUESTS[1], logprobs=None)):
        harness = Harness(SETUP.start(checkpoint))
        harness.add("a", PROMPTS[0], plain)
        if mate is not None:
            harness.add("b", PROMPTS[1], mate)
        harness.drain()
        streams.append(harness.stream("a"))
    assert streams[0] == streams[1] == streams[2]
