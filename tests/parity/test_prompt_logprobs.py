"""Log-probabilities of prompts against transformers, however the prompt comes to be computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from graphengine.sampling.params import SamplingParams
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Setup
from tests.tiny import make_checkpoint, make_model

pytestmark = pytest.mark.parity

PARAMS = SamplingParams(max_tokens=6, prompt_logprobs=3, ignore_eos=True)
PROMPT = [3, 4, 5, 3, 4, 5, 3, 250, 1, 1, 17, 4, 5]
SETUP = Setup(k=3, max_model_len=300)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("prompts") / "model")


def check(harness: Harness, name: str, number: int = 3) -> None:
    """Against a teacher-forced log-softmax."""
    prompt = list(harness.requests[name].prompt_token_ids)
    found = harness.outputs[name].prompt_logprobs
    assert found is not None
    assert found[0] is None
    assert len(found) == len(prompt)
    with torch.no_grad():
        logits = make_model("llama").eval()(torch.tensor([prompt])).logits[0]
    for position, entry in enumerate(found[1:], start=1):
        row = logits[position - 1].double().log_softmax(-1)
        token = prompt[position]
        assert entry is not None
        for other, one in entry.items():
            assert one.logprob == pytest.approx(float(row[other]), abs=1e-4)
        assert set(entry) == {*row.topk(number).indices.tolist(), token}
        assert entry[token].rank == int((row > row[token]).sum()) + 1


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("budget", [None, 4, 5, 7])
def test_every_prompt_token(checkpoint: Path, k: int, budget: int | None) -> None:
    """Rows of another chunk or request, the last token of a chunk left out (cases 13, 32)."""
    harness = Harness(replace(SETUP, k=k, budget=budget).start(checkpoint))
    harness.add("a", PROMPT, PARAMS)
    harness.add("quiet", PROMPT[3:], replace(PARAMS, prompt_logprobs=None))
    harness.add("b", PROMPT[::-1], replace(PARAMS, prompt_logprobs=0))
    harness.add("one token", [7], PARAMS)
    harness.drain()
    check(harness, "a")
    found = harness.outputs["b"].prompt_logprobs
    assert found is not None
    assert all(entry is not None and len(entry) == 1 for entry in found[1:])
    assert harness.outputs["quiet"].prompt_logprobs is None
    assert harness.outputs["one token"].prompt_logprobs == [None]


@pytest.mark.parametrize("length", [255, 256, 257, 258])
def test_prompts_around_the_largest_forward(checkpoint: Path, length: int) -> None:
    """A forward's last row lost, or more rows than the logits have room for (case 13)."""
    harness = Harness(replace(SETUP, budget=512).start(checkpoint), poison=False)
    prompt = [(7 * index) % 250 for index in range(length)]
    harness.add("a", prompt, PARAMS)
    harness.drain()
    check(harness, "a")


def test_a_cached_prompt_is_read_again(checkpoint: Path) -> None:
    """Positions that the prefix cache saved, missing."""
    harness = Harness(SETUP.start(checkpoint))
    for name in ("a", "b"):
        harness.add(name, PROMPT, PARAMS)
        harness.drain()
        check(harness, name)
        assert harness.outputs[name].metrics.num_cached_tokens == 0
    harness.add("c", PROMPT, replace(PARAMS, prompt_logprobs=None))
    harness.drain()
    assert harness.outputs["c"].metrics.num_cached_tokens == 12


def test_preempted_between_chunks_and_after(checkpoint: Path) -> None:
    """Entries given twice, or rows of generated text taken for the prompt's."""
    setup = replace(SETUP, budget=6, num_blocks=10, max_num_seqs=3, max_model_len=32)
    harness = Harness(setup.start(checkpoint))
    params = replace(PARAMS, max_tokens=12)
    for index in range(3):
        harness.add(str(index), [*PROMPT[index:], index], params)
    harness.drain()
    assert harness.engine.stats().num_preemptions > 0
    for index in range(3):
        check(harness, str(index))


def test_they_are_the_first_answers(checkpoint: Path) -> None:
    """A prompt that is read once for each of n answers."""
    harness = Harness(SETUP.start(checkpoint))
    harness.engine.add_request("a", PROMPT, replace(PARAMS, n=3, temperature=1.0))
    asked = [request.needs_whole_prompt for request in harness.engine.scheduler.waiting]
    assert asked == [True, False, False]
    outputs = []
    while harness.engine.has_unfinished_requests():
        outputs += harness.engine.step()
    found = outputs[-1].prompt_logprobs
    assert found is not None
    assert len(found) == len(PROMPT)
