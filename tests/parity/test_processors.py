"""Processed logits against transformers' own processors, one by one and stacked in its order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.generation import logits_process as theirs

from capture.stream import InlineStream
from graphengine.request import Request
from graphengine.sampling.cpu import NativeSampler
from graphengine.sampling.masks import mask_words
from graphengine.sampling.params import SamplingParams
from graphengine.sampling.state import SamplerState

pytestmark = pytest.mark.parity

VOCAB, NUM_ROWS = 1000, 5
PROMPT, OUTPUT = [3, 17, 999, 17], [5, 5, 3, 400, 8]
CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.3},
    "hot": {"temperature": 50.0},
    "top-k": {"temperature": 1.0, "top_k": 7},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "top-p of one": {"temperature": 0.1, "top_p": 0.01},
    "min-p": {"temperature": 1.0, "min_p": 0.02},
    "repetition": {"temperature": 1.0, "repetition_penalty": 1.3},
    "repetition below 1": {"temperature": 1.0, "repetition_penalty": 0.5},
    "greedy repetition": {"temperature": 0.0, "repetition_penalty": 1.7},
    "all": {
        "temperature": 1.4,
        "top_k": 200,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "logit_bias": {5: 2.0, 900: 9.0},
    },
}


def expected(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What transformers samples from, as log-probabilities."""
    stack: list[Any] = []
    if params.bias:
        stack.append(theirs.SequenceBiasLogitsProcessor({(t,): v for t, v in params.bias}))
    if params.repetition_penalty != 1:
        stack.append(theirs.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature:
        stack.append(theirs.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        stack.append(theirs.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        stack.append(theirs.TopPLogitsWarper(params.top_p))
    if params.min_p:
        stack.append(theirs.MinPLogitsWarper(params.min_p))
    ids = torch.tensor([PROMPT + OUTPUT]).repeat(NUM_ROWS, 1)
    scores = theirs.LogitsProcessorList(stack)(ids, logits.clone())
    return scores.log_softmax(-1)


@pytest.mark.parametrize("name", CASES)
def test_processors(name: str) -> None:
    """Guards an order, a tie or a sign that others have otherwise."""
    params = SamplingParams(**CASES[name])
    state = SamplerState(
        max_num_seqs=1, vocab_size=VOCAB, device=torch.device("cpu"), stream=InlineStream()
    )
    request = Request("a", PROMPT, params, max_model_len=99)
    request.token_ids.extend(OUTPUT)
    state.start(0, request)
    logits = 3 * torch.randn(NUM_ROWS, VOCAB, generator=torch.Generator().manual_seed(0))
    views = {
        "processed": torch.full((NUM_ROWS, VOCAB), float("nan")),
        "target_ids": torch.zeros(NUM_ROWS, dtype=torch.int32),
        "logits": logits,
        "token_ids": torch.zeros(NUM_ROWS, dtype=torch.int32),
        "positions": torch.arange(NUM_ROWS, dtype=torch.int32),
        "query_len": torch.ones(1, dtype=torch.int32),
        "state_rows": torch.zeros(NUM_ROWS, dtype=torch.int32),
        "mask": torch.full((NUM_ROWS, mask_words(VOCAB)), -1, dtype=torch.int32),
    }
    NativeSampler(state)(views)
    ours = views["processed"].log_softmax(-1)
    wanted = expected(logits, params)
    assert torch.equal(ours.isinf(), wanted.isinf()), "another set of tokens"
    torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=0)
