"""TritonSampler and TritonLogprobs: a whole cell, padding and ragged drafts, as on the CPU."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from capture.ops import Op, set_recorder
from graphengine.sampling.cpu import NativeLogprobs, NativeSampler
from graphengine.sampling.state import SamplerState
from tests.graphengine.sampling.test_state import VOCAB, make_state, request

pytest.importorskip("triton")

from graphengine.sampling.triton import TritonLogprobs, TritonSampler

QUERY_LEN = 3
LIVE = 4  # requests; two more are padding
WIDTH = 6


class Recorded:
    """The ops that a step is made of, in the order of their calls."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def record(self, op: Op, args: tuple[object, ...]) -> None:
        self.names.append(op.name)


def started() -> SamplerState:
    """Requests of every kind in rows 0 to 3, the padding row 4."""
    state = make_state(LIVE)
    some = {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "seed": 1 << 40}
    state.start(0, request(1, 2, 3, **some))
    state.start(1, request(4, 4, repetition_penalty=1.3, frequency_penalty=0.5, temperature=0.0))
    state.start(2, request(7, temperature=1.0, min_p=0.02, logit_bias={3: 4.0, 9: -50.0}, seed=4))
    state.start(3, request(8, temperature=1.5, allowed_token_ids=[1, 33, 34, 69], seed=5))
    state.counts[1, 11] = 2
    return state


def cell(state: SamplerState) -> dict[str, torch.Tensor]:
    """Views of a cell: requests in another order than their rows, fewer drafts than rows."""
    generator = torch.Generator().manual_seed(7)
    rows, padded = [2, 0, 3, 1], LIVE + 2
    num_rows = padded * QUERY_LEN
    logits = 3 * torch.randn(num_rows, VOCAB, generator=generator)
    logits[LIVE * QUERY_LEN :] = float("nan")
    mask = np.full((num_rows, 3), -1, dtype=np.int32)
    place = rows.index(3) * QUERY_LEN
    mask[place : place + QUERY_LEN] = state.mask(3, np.arange(QUERY_LEN, dtype=np.int32))
    tokens = torch.randint(0, VOCAB, (num_rows,), generator=generator, dtype=torch.int32)
    tokens[LIVE * QUERY_LEN :] = 0
    numbers = dict.fromkeys(("processed", "draft_probs"), (num_rows, VOCAB))
    numbers["logprob_values"] = (num_rows, WIDTH)
    views = {name: torch.full(shape, float("nan")) for name, shape in numbers.items()}
    views["draft_probs"][:] = torch.softmax(logits.nan_to_num() + 1, 1)
    for name, shape in (("target_ids", (num_rows,)), ("logprob_ranks", (num_rows,))):
        views[name] = torch.full(shape, -9, dtype=torch.int32)
    views["logprob_ids"] = torch.full((num_rows, WIDTH), -9, dtype=torch.int32)
    return views | {
        "logits": logits,
        "token_ids": tokens,
        "positions": torch.arange(num_rows, dtype=torch.int32) + 5,
        "query_len": torch.tensor([QUERY_LEN], dtype=torch.int32),
        "state_rows": torch.tensor([*rows, LIVE, LIVE, LIVE], dtype=torch.int32),
        "mask": torch.from_numpy(mask),
        "num_draft_tokens": torch.tensor([2, 1, 2, 0, 0, 0, 0], dtype=torch.int32),
        "has_draft_probs": torch.tensor([1, 0, 1, 0, 0, 0, 0], dtype=torch.int32),
    }


def same(got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], *names: str) -> None:
    for name in names:
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("rejection", [False, True])
def test_a_cell_is_sampled_as_on_the_cpu(rejection: bool) -> None:
    """Guards arguments in the wrong order, which compiles and runs."""
    state = started()
    got, wanted = cell(state), cell(state)
    TritonSampler(state, rejection=rejection)(got)
    NativeSampler(state, rejection=rejection)(wanted)
    same(got, wanted, "processed", "target_ids")
    TritonLogprobs()(got)
    NativeLogprobs()(wanted)
    same(got, wanted, "logprob_ids", "logprob_values", "logprob_ranks")


def test_every_call_is_an_op() -> None:
    """Guards a launch that a recorder does not see."""
    state, recorded = started(), Recorded()
    views = cell(state)
    sampler, logprobs = TritonSampler(state, rejection=True), TritonLogprobs()
    before = {name: view.clone() for name, view in views.items()}
    set_recorder(recorded)
    try:
        sampler(views)
        logprobs(views)
    finally:
        set_recorder(None)
    assert recorded.names == ["process_logits", "sample_rows", "reject_rows", "row_logprobs"]
    for name, view in views.items():
        torch.testing.assert_close(view, before[name], equal_nan=True, rtol=0, atol=0)
