"""SamplerState: rows that hold what their request asks for, and nothing of the one before."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
import torch

from capture.stream import InlineStream
from graphengine.request import Request
from graphengine.sampling.masks import mask_of
from graphengine.sampling.params import SamplingParams
from graphengine.sampling.settings import DTYPE, MASK, NEUTRAL, PENALTIES
from graphengine.sampling.state import SamplerState

VOCAB = 70


def request(*prompt: int, eos: tuple[int, ...] = (5,), **fields: Any) -> Request:
    params = SamplingParams(max_tokens=20, **fields)
    found = Request("a", prompt or (1,), params, max_model_len=99, eos_token_ids=eos)
    if params.seed is None:
        found.seed = 77  # as the engine does
    return found


def make_state(max_num_seqs: int) -> SamplerState:
    return SamplerState(
        max_num_seqs=max_num_seqs,
        vocab_size=VOCAB,
        device=torch.device("cpu"),
        stream=InlineStream(),
    )


def settings(state: SamplerState, row: int) -> Any:
    return state.settings[row].numpy().view(DTYPE)[0]


def unpacked(mask: np.ndarray[Any, Any]) -> set[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


@pytest.mark.parametrize("ids", [(), (0,), (31, 32, 63, 64, 69), range(VOCAB), (3, VOCAB, 999)])
def test_masks_hold_the_ids(ids: Collection[int]) -> None:
    """Guards a bit in the wrong word, or one beyond the vocabulary."""
    assert unpacked(mask_of(ids, VOCAB)) == {i for i in ids if i < VOCAB}
    assert unpacked(mask_of(None, VOCAB)) >= set(range(VOCAB))


def test_a_row_forgets_the_request_before() -> None:
    """Guards penalties, bias or a mask of somebody who has gone."""
    state = make_state(2)
    full = {"temperature": 1.0, "repetition_penalty": 2.0, "logit_bias": {3: 4.0}}
    state.start(0, request(1, 2, **full, allowed_token_ids=[1, 2], min_tokens=3, seed=9))
    assert settings(state, 0)["flags"] == PENALTIES | MASK
    assert settings(state, 0)["seed"] == 9
    state.counts[0, 7] += 2  # by steps
    state.start(0, request())
    expected = NEUTRAL.copy()
    expected["seed"] = 77
    assert settings(state, 0) == expected
    assert not state.has_mask(0)
    state.start(0, request(4, frequency_penalty=1.0))
    assert not state.counts[0].any()
    assert state.in_prompt[0].nonzero().flatten().tolist() == [4]
    assert settings(state, state.padding_row) == NEUTRAL


def test_stop_ids_may_come_once_enough_tokens_are_out() -> None:
    """Guards min_tokens off by one: row j comes after the output and j drafts."""
    state = make_state(1)
    stops = {"stop_token_ids": [64], "min_tokens": 3}
    state.start(0, request(**stops))
    masks = state.mask(0, np.arange(5, dtype=np.int32))
    everything = unpacked(mask_of(None, VOCAB))
    assert [everything - unpacked(mask) for mask in masks] == [{5, 64}] * 3 + [set()] * 2
    state.start(0, request(**stops, allowed_token_ids=[4, 5]))
    masks = state.mask(0, np.array([2, 3], dtype=np.int32))
    assert [unpacked(mask) for mask in masks] == [{4}, {4, 5}]
