"""The verification rule in its four forms: plain loops, torch, the C++ and the Triton kernel."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from graphengine.sampling.cpu import NativeGreedyVerify
from graphengine.sampling.verifier import NO_STOP, GreedyVerify, greedy_verify, verify_reference
from graphengine.triton_kernels import verify

MAX_DRAFTS, NUM_ROWS, NUM_STOPS = 4, 6, 3
FORMS = {"torch": greedy_verify, "native": NativeGreedyVerify(), "triton": verify.greedy_verify}


@dataclass(frozen=True, slots=True)
class Case:
    """One request of a cell."""

    targets: list[int]  # [query_len]
    drafts: list[int]  # at most query_len - 1
    stops: list[int]
    room: int


def random_case(draw: random.Random, query_len: int) -> Case:
    targets = [draw.randrange(4) for _ in range(query_len)]
    num_drafts = draw.randint(0, query_len - 1)
    return Case(
        targets=targets,
        drafts=[t if draw.random() < 0.8 else draw.randrange(4) for t in targets[:num_drafts]],
        stops=draw.sample(range(4), draw.choice((0, 0, 0, 1, NUM_STOPS))),
        room=draw.randint(1, MAX_DRAFTS + 2),
    )


def run(verify: GreedyVerify, cases: list[Case], query_len: int) -> list[list[int]]:
    """The packed rows of a cell; buffers are larger than the cell, with junk behind it."""
    packed = torch.full((NUM_ROWS, MAX_DRAFTS + 3), 77, dtype=torch.int32)
    targets = torch.full((NUM_ROWS * (MAX_DRAFTS + 1),), 3, dtype=torch.int32)
    tokens = torch.full((NUM_ROWS * (MAX_DRAFTS + 1) + 9,), 3, dtype=torch.int32)
    num_drafts = torch.zeros(NUM_ROWS, dtype=torch.int32)
    stops = torch.full((NUM_ROWS, NUM_STOPS), NO_STOP, dtype=torch.int32)
    room = torch.ones(NUM_ROWS, dtype=torch.int32)
    for row, case in enumerate(cases):
        start = row * query_len
        targets[start : start + query_len] = torch.tensor(case.targets)
        tokens[start : start + 1 + len(case.drafts)] = torch.tensor([0, *case.drafts])
        num_drafts[row] = len(case.drafts)
        stops[row, : len(case.stops)] = torch.tensor(case.stops)
        room[row] = case.room
    verify(packed, targets, tokens, torch.tensor([query_len]).int(), num_drafts, stops, room)
    return packed.tolist()


@pytest.mark.parametrize("form", FORMS)
def test_every_form_follows_the_rule(form: str) -> None:
    """Guards a draft taken after a mismatch, a token behind a stop, or one beyond the room.

    Few token ids, so that confirmed drafts, stops and both together are common; ragged drafts.
    """
    draw = random.Random(0)
    lengths, cut_behind_a_draft = set(), 0
    turns = 100 if form == "triton" else 400  # interpreted: milliseconds a request
    for _ in range(turns):
        query_len = draw.randint(1, MAX_DRAFTS + 1)
        cases = [random_case(draw, query_len) for _ in range(draw.randint(1, NUM_ROWS))]
        packed = run(FORMS[form], cases, query_len)
        for case, (count, accepted, *ids) in zip(cases, packed, strict=False):
            expected, num_accepted = verify_reference(
                case.targets, case.drafts, case.stops, case.room
            )
            assert (count, accepted) == (len(expected), num_accepted)
            assert ids == expected + [-1] * (MAX_DRAFTS + 1 - count)
            lengths.add(count)
            cut_behind_a_draft += accepted == count
    assert lengths == set(range(1, MAX_DRAFTS + 2))
    assert cut_behind_a_draft > turns // 4


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("drafts", "stops", "room", "expected"),
    [
        ([1, 2], [], 9, [3, 2, 1, 2, 3]),  # all confirmed, and the bonus
        ([1, 9], [], 9, [2, 1, 1, 2]),  # one confirmed, one recovered
        ([9, 2], [], 9, [1, 0, 1]),  # what is right behind a mismatch counts for nothing
        ([], [], 9, [1, 0, 1]),
        ([1, 2], [2], 9, [2, 2, 1, 2]),  # a stop that was drafted: accepted, and the last
        ([1, 9], [2], 9, [2, 1, 1, 2]),  # a stop that was recovered
        ([1, 2], [], 1, [1, 1, 1]),  # drafts beyond the room are not emitted, hence not accepted
        ([1, 2], [], 2, [2, 2, 1, 2]),
    ],
)
def test_emitted_drafts_are_counted(
    form: str, drafts: list[int], stops: list[int], room: int, expected: list[int]
) -> None:
    """Guards the accepted count, which the host has no other source of."""
    (row, *_) = run(FORMS[form], [Case([1, 2, 3], drafts, stops, room)], 3)
    assert row == expected + [-1] * (MAX_DRAFTS + 3 - len(expected))
    count, accepted, *ids = expected
    assert verify_reference([1, 2, 3], drafts, stops, room) == (ids, accepted)
    assert count == len(ids)


def test_the_forms_agree_on_padding_too() -> None:
    """Guards the switch between compile modes: the whole packed array is the same."""
    cases = [Case([1, 2, 3], [1, 2], [2], 5), Case([1, 2, 3], [1, 2], [], 5)]
    rows = {form: run(verify, cases, 3) for form, verify in FORMS.items()}
    assert rows["torch"] == rows["native"] == rows["triton"]
    assert [row[:2] for row in rows["native"]] == [[2, 2], [3, 2], *[[1, 0]] * 4]
