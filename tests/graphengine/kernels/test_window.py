"""A chain's first kernel: which rows a request has, out of what the device knows of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphengine.device_rows import DeviceRows
from graphengine.draft_ops import NativeDraftOps
from graphengine.models.native_ops import NativeOps
from graphengine.triton_draft_ops import TritonDraftOps
from proposers.device import WINDOW_READ, WINDOW_WRITTEN
from proposers.requests import REQUEST, WORDS
from tests.graphengine.kernels.test_request_rows import (
    BLOCK,
    MAX_LEN,
    ROWS,
    Held,
    make_rows,
    row_of,
)

VOCAB = 16
POSITION = list(REQUEST.names or ()).index("num_tokens")


@dataclass(frozen=True)
class Chain:
    """What does not change between the calls of a chain."""

    k: int
    width: int
    shift: int
    num_embeddings: int
    loop_rows: tuple[int, ...]


@dataclass(frozen=True)
class Drafting:
    """A request of a cell."""

    num_tokens: int
    drafts: int
    filled: int  # what was said to be valid, were all drafts accepted: perhaps beyond the tokens


@st.composite
def cells(draw: Any) -> tuple[Chain, list[Drafting | None]]:
    k, shift = draw(st.integers(1, 4)), draw(st.integers(0, 1))
    loop_rows = tuple(draw(st.integers(0, count)) for count in range(k + 1))
    chain = Chain(k, draw(st.integers(1, 6)), shift, draw(st.sampled_from([9, VOCAB])), loop_rows)
    places: list[Drafting | None] = []
    for _ in range(draw(st.integers(1, ROWS - 1))):
        known = draw(st.integers(shift + 1, MAX_LEN))
        first = max(known - shift - chain.width, 0)  # the host fills what lies before it
        filled = draw(st.integers(first, known + k))
        one = Drafting(known, draw(st.integers(0, k)), filled)
        places.append(draw(st.sampled_from([one, one, None])))
    return chain, places


def expected(chain: Chain, places: list[Drafting | None], table: Any, rows: DeviceRows) -> Any:
    """By the rule, one row at a time."""
    num_reqs = len(places)
    found = {name: np.zeros(num_reqs * chain.width, dtype=int) for name in WINDOW_WRITTEN[:3]}
    found["draft.last_rows"] = np.arange(num_reqs) * chain.width
    for name in ("draft.loop_positions", "draft.loop_slots"):
        found[name] = np.zeros((chain.k + 1, num_reqs), dtype=int)
    positions_of_first = np.zeros(num_reqs, dtype=int)
    for index, one in enumerate(places):
        if one is None or not one.drafts:
            continue
        tokens = rows.token_ids[row_of(index)].tolist()
        end = one.num_tokens - chain.shift  # slots whose token is known
        first = max(end - chain.width, 0, one.filled)
        slots = list(range(min(first, end - 1), end))  # the last one is run at any rate
        for j, slot in enumerate(slots):
            t = index * chain.width + j
            found["token_ids"][t] = min(tokens[slot + chain.shift], chain.num_embeddings - 1)
            found["positions"][t] = slot
            found["slot_mapping"][t] = table[index, slot // BLOCK] * BLOCK + slot % BLOCK
        found["draft.last_rows"][index] += len(slots) - 1
        positions_of_first[index] = one.num_tokens
        for step in range(chain.k + 1):
            place = min(end + step, MAX_LEN - 1)
            found["draft.loop_positions"][step, index] = place
            if step < chain.loop_rows[one.drafts]:
                slot = table[index, place // BLOCK] * BLOCK + place % BLOCK
                found["draft.loop_slots"][step, index] = slot
    return found, positions_of_first


def ops_of(form: str, rows: DeviceRows) -> Any:
    kind = NativeDraftOps if form == "native" else TritonDraftOps
    layers = NativeOps(torch.float32, 1e-5)
    return kind(layers, None, rows, block_size=BLOCK, draft_sampling="greedy")


@pytest.mark.parametrize("form", ["native", "triton"])
@given(case=cells())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_of_a_chain(form: str, case: tuple[Chain, list[Drafting | None]]) -> None:
    """A token, position or slot of another; a row before what is filled; padding in a block."""
    chain, places = case
    num_reqs = len(places)
    rows = make_rows(
        [None if one is None else Held(one.num_tokens, MAX_LEN, 0, 1) for one in places]
    )
    generator = np.random.default_rng(num_reqs)
    table = generator.integers(1, 50, (num_reqs, MAX_LEN // BLOCK), dtype=np.int32)
    pairs = list(enumerate(places))
    read = {
        "state_rows": [rows.padding_row if one is None else row_of(i) for i, one in pairs],
        "allowed_drafts": [3 if one is None else one.drafts for one in places],
        "draft.filled": [-7 if one is None else one.filled for one in places],
    }
    views = {name: torch.tensor(values, dtype=torch.int32) for name, values in read.items()}
    views["block_table"] = torch.from_numpy(table)
    wanted, firsts = expected(chain, places, table, rows)
    for name, values in wanted.items():
        views[name] = torch.full((values.size,), -9, dtype=torch.int32)
    words = generator.integers(0, 99, (num_reqs, WORDS), dtype=np.int32)
    views["draft.requests"] = torch.from_numpy(words.copy())
    assert set(views) == {*WINDOW_READ, *WINDOW_WRITTEN}
    rules = [chain.width, chain.shift, chain.num_embeddings, *chain.loop_rows]
    ops_of(form, rows).prepare_window(views, torch.tensor(rules, dtype=torch.int32))
    for name, values in wanted.items():
        assert views[name].tolist() == values.flatten().tolist(), name
    words[:, POSITION] = firsts
    assert np.array_equal(views["draft.requests"].numpy(), words)
