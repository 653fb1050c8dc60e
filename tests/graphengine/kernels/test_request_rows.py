"""A step's first and last kernel: inputs out of the requests' rows, rows out of what is emitted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from capture.stream import InlineStream
from graphengine.device_rows import DeviceRows
from graphengine.request import Request
from graphengine.row_ops import PREPARED, PREPARED_FROM, NativeRowOps
from graphengine.sampling.params import SamplingParams
from graphengine.triton_row_ops import TritonRowOps

BLOCK, MAX_LEN, VOCAB, ROWS = 4, 24, 16, 5  # of which one is padding
ANY = 1 << 30


@dataclass(frozen=True)
class Held:
    """A request that a cell holds."""

    num_tokens: int
    limit: int  # num_tokens and more, or as many: it has ended on the way
    allowed: int
    most: int


@st.composite
def cells(draw: Any) -> tuple[list[Held | None], int]:
    """Places of a cell (None: padding), and its query length."""
    query_len = draw(st.integers(1, 5))
    places: list[Held | None] = []
    for _ in range(draw(st.integers(1, ROWS - 1))):
        known = draw(st.integers(1, MAX_LEN))
        held = Held(
            known,
            draw(st.integers(known, MAX_LEN)),
            draw(st.integers(0, query_len - 1)),
            draw(st.sampled_from([1, 3, ANY])),
        )
        places.append(draw(st.sampled_from([held, held, None])))
    return places, query_len


def expected(places: list[Held | None], query_len: int, views: dict[str, Any]) -> dict[str, Any]:
    """By the rule, one row at a time."""
    found: dict[str, list[int]] = {name: [] for name in PREPARED}
    for index, held in enumerate([*places, *[None] * (ROWS - 1 - len(places))]):
        room = 0 if held is None else held.limit - held.num_tokens
        drafts = 0 if held is None else min(held.allowed, max(room - 1, 0))
        found["num_draft_tokens"].append(drafts)
        found["max_new_tokens"].append(1 if held is None else min(room, held.most))
        if index >= len(places):
            continue
        for j in range(query_len):
            live = room > 0 and j <= drafts
            position = 0 if held is None else min(held.num_tokens - 1 + j, MAX_LEN - 1)
            block = int(views["block_table"][index, position // BLOCK])
            known = 0 if held is None else token(index, held.num_tokens - 1)
            draft = int(views["draft_token_ids"][index * query_len + j - 1])
            found["token_ids"].append((known if j == 0 else draft) if live else 0)
            found["positions"].append(position)
            found["slot_mapping"].append(block * BLOCK + position % BLOCK if live else 0)
    return found


def token(index: int, position: int) -> int:
    return (7 * index + position) % VOCAB


def make_rows(places: list[Held | None]) -> DeviceRows:
    rows = DeviceRows(
        max_num_seqs=ROWS - 1,
        max_model_len=MAX_LEN,
        vocab_size=VOCAB,
        device=torch.device("cpu"),
        stream=InlineStream(),
    )
    for index, held in enumerate(places):
        if held is None:
            continue
        params = SamplingParams(repetition_penalty=1.5 if index % 2 else 1.0, max_tokens=MAX_LEN)
        request = Request("a", [0], params, max_model_len=held.limit)
        request.token_ids = [token(index, position) for position in range(held.num_tokens)]
        rows.start(row_of(index), request)
    return rows


def row_of(index: int) -> int:
    return ROWS - 2 - index


FORMS = {"native": NativeRowOps, "triton": TritonRowOps}


@pytest.mark.parametrize("form", FORMS)
@given(case=cells())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_of_a_cell(form: str, case: tuple[list[Held | None], int]) -> None:
    """A token, position or slot of another; drafts behind a limit; padding that reaches a block."""
    places, query_len = case
    generator = np.random.default_rng(len(places) + query_len)
    rows = make_rows(places)
    ops = FORMS[form](rows, BLOCK)
    num_tokens = len(places) * query_len
    inputs = {
        "state_rows": [
            rows.padding_row if held is None else row_of(i) for i, held in enumerate(places)
        ],
        "allowed_drafts": [0 if held is None else held.allowed for held in places],
        "most_new_tokens": [ANY if held is None else held.most for held in places],
    }
    fill = {"state_rows": rows.padding_row}
    missing = ROWS - 1 - len(places)
    views = {
        name: torch.tensor([*values, *[fill.get(name, 0)] * missing], dtype=torch.int32)
        for name, values in inputs.items()
    }
    table = generator.integers(1, 50, (len(places), MAX_LEN // BLOCK), dtype=np.int32)
    table[[i for i, held in enumerate(places) if held is None]] = 0
    views["block_table"] = torch.from_numpy(table)
    drafts = generator.integers(0, VOCAB, num_tokens, dtype=np.int32)
    views["draft_token_ids"] = torch.from_numpy(drafts)
    assert set(views) == set(PREPARED_FROM)
    for name in PREPARED:
        size = ROWS - 1 if name in ("num_draft_tokens", "max_new_tokens") else num_tokens
        views[name] = torch.full((size,), -9, dtype=torch.int32)
    ops.prepare(views)
    wanted = expected(places, query_len, views)
    for name in PREPARED:
        assert views[name].tolist() == wanted[name], name
    check_commit(places, rows, ops, views, generator)


def check_commit(
    places: list[Held | None],
    rows: DeviceRows,
    ops: Any,
    views: dict[str, torch.Tensor],
    generator: np.random.Generator,
) -> None:
    """What is emitted is appended and, under penalties, counted; other rows stay as they are."""
    known = {i: rows.token_ids[row_of(i), : int(rows.num_tokens[row_of(i)])].tolist()
             for i, held in enumerate(places) if held is not None}  # fmt: skip
    counts, padding = rows.sampler.counts.clone(), rows.token_ids[rows.padding_row].clone()
    packed = torch.full((ROWS - 1, 8), -1, dtype=torch.int32)
    packed[:, 0] = 3  # of padding, too
    for index, held in enumerate(places):
        room = 0 if held is None else int(views["max_new_tokens"][index])
        count = min(room, int(generator.integers(0, 6))) if held is not None else 3
        packed[index, 0] = count
        packed[index, 2 : 2 + count] = torch.arange(count, dtype=torch.int32) % 2
    views["packed"] = packed
    ops.commit(views)
    for index, tokens in known.items():
        row, count = row_of(index), int(packed[index, 0])
        emitted = packed[index, 2 : 2 + count].tolist()
        assert rows.token_ids[row, : int(rows.num_tokens[row])].tolist() == tokens + emitted
        if index % 2:
            counts[row] += torch.bincount(packed[index, 2 : 2 + count], minlength=VOCAB).int()
    assert torch.equal(rows.sampler.counts, counts)
    assert torch.equal(rows.token_ids[rows.padding_row], padding)
    assert int(rows.num_tokens[rows.padding_row]) == 1
