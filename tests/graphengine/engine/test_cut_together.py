"""Ids, text, logprobs and counts end at one place (cases 1, 21, 42, 43), whatever drafts come.

Every request here ends inside a block for some number of accepted drafts: by an end-of-sequence id,
a stop string that may begin in the middle of a token, or the limit.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphengine.models.loader import open_model
from graphengine.sampling.params import SamplingParams
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Setup, scripted

K = 4
PROMPT = (1, 2, 3)
SETUP = Setup(k=K, max_model_len=128, max_num_seqs=6)
BASE = SamplingParams(max_tokens=24, temperature=1.0, seed=5, logprobs=3, ignore_eos=True)


@pytest.fixture(scope="module")
def jobs(checkpoints: Checkpoints) -> dict[str, SamplingParams]:
    """Requests over tokens of one, two and three letters."""
    tokenizer = open_model(checkpoints.get()).load_tokenizer()
    assert tokenizer is not None
    ids = {text: tokenizer.encode_plain(text) for text in ("a", "e", "h", "t", "th", "the")}
    assert all(len(found) == 1 for found in ids.values())
    letters = replace(BASE, allowed_token_ids=tuple(found[0] for found in ids.values()))
    end = ids["e"][0]
    return {
        "mid-token": replace(letters, stop=("ath", "hea"), max_tokens=60),
        "mid-token, included": replace(
            letters, seed=6, stop=("heth",), include_stop_str_in_output=True, max_tokens=60
        ),
        "stop id": replace(letters, seed=7, stop_token_ids=(end,), min_tokens=3),
        "limit": replace(letters, seed=8, max_tokens=13, frequency_penalty=0.7),
        "greedy, no logprobs": replace(BASE, temperature=0.0, logprobs=None, max_tokens=17),
        "no logprobs": replace(letters, seed=9, logprobs=None, stop=("eee", "tt")),
    }


def serve(harness: Harness, jobs: dict[str, SamplingParams]) -> Harness:
    """All at once; what streams is what the last output says."""
    shown = dict.fromkeys(jobs, "")
    for name, params in jobs.items():
        harness.add(name, PROMPT, params)
    while harness.engine.has_unfinished_requests():
        for output in harness.step():
            shown[output.request_id] += output.new_text
    for name, text in shown.items():
        assert text == harness.outputs[name].outputs[0].text
    return harness


@pytest.fixture(scope="module")
def plain(checkpoints: Checkpoints, jobs: dict[str, SamplingParams]) -> Harness:
    harness = serve(Harness(replace(SETUP, k=0).start(checkpoints.get())), jobs)
    reasons = {name: harness.reason(name) for name in jobs}
    assert set(reasons.values()) == {"stop", "length"}, reasons
    assert reasons["mid-token"] == reasons["mid-token, included"] == "stop"
    return harness


@pytest.mark.parametrize("script", [*(f"exactly {j}" for j in range(K + 1)), "ragged", "junk"])
def test_with_drafts_as_without(
    script: str, checkpoints: Checkpoints, jobs: dict[str, SamplingParams], plain: Harness
) -> None:
    """Rows gathered with the wrong offset, numbers of the step before, tokens behind the end."""
    name, _, accept = script.partition(" ")
    records = {job: [*PROMPT, *plain.stream(job)] for job in jobs}
    proposer = scripted(name, records, accept=int(accept or 0))  # type: ignore[arg-type]
    harness = serve(Harness(SETUP.start(checkpoints.get(), proposer)), jobs)
    for job, params in jobs.items():
        mine, theirs = harness.outputs[job].outputs[0], plain.outputs[job].outputs[0]
        assert mine.token_ids == theirs.token_ids, job
        assert (mine.text, mine.finish_reason) == (theirs.text, theirs.finish_reason)
        assert mine.logprobs == theirs.logprobs
        assert (mine.logprobs is None) == (params.logprobs is None)
        for entry in mine.logprobs or ():
            assert any(one.logprob != 0.0 for one in entry.values())
        metrics = harness.outputs[job].metrics
        kept = mine.token_origins.count("accepted")
        assert metrics.num_accepted_tokens == kept
        # A block that is cut behind an accepted draft has no recovered or bonus token.
        assert metrics.num_steps - (len(mine.token_ids) - kept) in (0, 1)
    total = sum(len(harness.stream(job)) for job in jobs)
    assert harness.engine.stats().num_emitted_tokens == total
