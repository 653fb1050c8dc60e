"""Draft.validate and the input values: each breach of the contract is found and its row named."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from proposers import Draft, ProposeInputs
from proposers.base import CacheRows
from tests.proposers.helpers import VOCAB_SIZE, make_inputs

INPUTS = make_inputs({"a": [1, 2], "b": [3]}, k=3, allowances=[3, 1])


def draft_of(rows: list[list[int]], lengths: list[int]) -> Draft:
    return Draft(
        token_ids=np.array(rows, dtype=np.int32), num_draft_tokens=np.array(lengths, dtype=np.int32)
    )


def test_good_drafts_pass() -> None:
    """Guards against a check that refuses what is allowed: none, some or all of the allowance."""
    for draft in (
        Draft.empty(2, 3),
        Draft.from_rows([[1, 2, 3], [VOCAB_SIZE - 1]], 3),
        Draft.from_rows([[0], []], 3),
        Draft.from_rows([[0], []], 3, match_lengths=[2, 0]),
        Draft.from_rows([[0], []], 3, match_lengths=[0, 1]),
    ):
        draft.validate(INPUTS, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("rows", "lengths", "message"),
    [
        (
            [[1, 2, 3, -1], [4, -1, -1, -1]],
            [3, 1],
            r"token_ids .* \(2, 4\), expected int32 \(2, 3\)",
        ),
        ([[1, 2, 3]], [3], r"token_ids .* \(1, 3\), expected int32 \(2, 3\)"),
        ([[1, 2, 3], [4, -1, -1]], [3], r"num_draft_tokens are int32 \(1,\)"),
        ([[1, 2, 3], [4, 5, -1]], [3, 2], "row 1: 2 drafts, allowance 1"),
        ([[-1, -1, -1], [-1, -1, -1]], [-1, 0], "row 0: -1 drafts"),
        ([[1, -1, 3], [4, -1, -1]], [3, 1], r"row 0: draft ids .* outside \[0, 48\)"),
        ([[1, 2, 48], [4, -1, -1]], [3, 1], r"row 0: draft ids .* outside \[0, 48\)"),
        ([[1, 2, 3], [4, 0, -1]], [3, 1], "row 1: .* is not -1 after 1 drafts"),
        ([[1, 2, 3], [4, -2, -1]], [3, 1], "row 1: .* is not -1 after 1 drafts"),
    ],
)
def test_breaches_are_named(rows: list[list[int]], lengths: list[int], message: str) -> None:
    """Guards against drafts that would write outside the row, or reach an embedding as -1."""
    with pytest.raises(AssertionError, match=message):
        draft_of(rows, lengths).validate(INPUTS, VOCAB_SIZE)


def test_wrong_dtype_is_named() -> None:
    """Guards against int64 drafts that a static int32 buffer would refuse much later."""
    draft = Draft(token_ids=np.full((2, 3), -1), num_draft_tokens=np.zeros(2, dtype=np.int32))
    with pytest.raises(AssertionError, match=r"token_ids are int64 .* expected int32"):
        draft.validate(INPUTS, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.array([1], dtype=np.int32), r"draft_kv_lens are int32 \(1,\), expected int32 \(2,\)"),
        (np.array([1, -1], dtype=np.int32), "row 1: -1 rows of draft KV, of 4 tokens and drafts"),
        (np.array([6, 1], dtype=np.int32), "row 0: 6 rows of draft KV, of 5 tokens and drafts"),
    ],
)
def test_draft_rows_are_of_history_and_drafts(rows: np.ndarray, message: str) -> None:
    """Guards against draft KV that is said to be valid and that nobody can have written."""
    draft = replace(Draft.empty(2, 3), draft_kv_lens=rows)
    with pytest.raises(AssertionError, match=message):
        draft.validate(INPUTS, VOCAB_SIZE)
    cache = CacheRows(
        block_table=np.zeros((2, 1), dtype=np.int32),
        draft_kv_lens=np.array([2, 1], dtype=np.int32),
    )
    fewer = replace(draft, draft_kv_lens=np.array([2, 0], dtype=np.int32))
    with pytest.raises(AssertionError, match=r"row 1: 0 rows of draft KV, .*; there were 1"):
        fewer.validate(replace(INPUTS, cache=cache), VOCAB_SIZE)
    fine = replace(draft, draft_kv_lens=np.array([5, 0], dtype=np.int32))
    fine.validate(INPUTS, VOCAB_SIZE)
    assert fine.rows([1]).draft_kv_lens.tolist() == [0]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (np.array([1], dtype=np.int32), r"match_lengths are int32 \(1,\), expected int32 \(2,\)"),
        (np.array([1, 1]), r"match_lengths are int64 \(2,\), expected int32 \(2,\)"),
        (np.array([1, -1], dtype=np.int32), "row 1: -1 tokens matched of a history of 1"),
        (np.array([3, 1], dtype=np.int32), "row 0: 3 tokens matched of a history of 2"),
    ],
)
def test_match_lengths_are_of_the_history(lengths: np.ndarray, message: str) -> None:
    """Guards against a match that nobody can have found overruling a model's drafts."""
    draft = Draft(
        token_ids=np.full((2, 3), -1, dtype=np.int32),
        num_draft_tokens=np.zeros(2, dtype=np.int32),
        match_lengths=lengths,
    )
    with pytest.raises(AssertionError, match=message):
        draft.validate(INPUTS, VOCAB_SIZE)


def test_probs_cover_every_draft_and_token() -> None:
    """Guards against probabilities over the draft's own, smaller vocabulary (case 36)."""
    for vocab_size, fits in ((VOCAB_SIZE, True), (VOCAB_SIZE - 16, False)):
        draft = Draft(
            token_ids=np.full((2, 3), -1, dtype=np.int32),
            num_draft_tokens=np.zeros(2, dtype=np.int32),
            probs=torch.zeros(2, 3, vocab_size),
        )
        if fits:
            draft.validate(INPUTS, VOCAB_SIZE)
        else:
            with pytest.raises(AssertionError, match="probs are float32"):
                draft.validate(INPUTS, VOCAB_SIZE)


def test_from_rows_refuses_a_row_wider_than_k() -> None:
    """Guards against a row that is cut silently."""
    with pytest.raises(AssertionError, match="row 1 has 3 drafts, the width is 2"):
        Draft.from_rows([[1], [1, 2, 3]], 2)


def test_inputs_must_agree_on_the_number_of_rows() -> None:
    """Guards against histories that are paired with the wrong request."""
    history = np.array([1], dtype=np.int32)
    with pytest.raises(AssertionError, match="2 request ids but 1 histories"):
        ProposeInputs(
            request_ids=["a", "b"],
            token_ids=[history],
            num_draft_tokens=np.zeros(2, dtype=np.int32),
            k=1,
        )
    with pytest.raises(AssertionError, match=r"num_draft_tokens has shape \(1,\), expected \(2,\)"):
        ProposeInputs(
            request_ids=["a", "b"],
            token_ids=[history, history],
            num_draft_tokens=np.zeros(1, dtype=np.int32),
            k=1,
        )


@pytest.mark.parametrize(
    ("q", "message"),
    [
        ({3: 0.5}, "draft row 0: probabilities that sum to .0.5"),
        ({3: 0.9, 4: 0.9}, "draft row 0: probabilities that sum to .1.7"),
        ({3: 1.5, 4: -0.5}, r"sum to .1.0, .*, the least of them .-0.5"),
        ({3: float("nan")}, "draft row 0: a draft has probability .nan"),
        ({4: 1.0}, "draft row 0: a draft has probability .0.0"),
    ],
)
def test_probs_are_a_distribution_that_may_give_the_draft(
    q: dict[int, float], message: str
) -> None:
    """Guards against a q that is not what drew the draft, which biases verification (case 4)."""
    probs = torch.zeros(2, 3, VOCAB_SIZE)
    for token, value in q.items():
        probs[0, 0, token] = value
    draft = Draft.from_rows([[3], []], 3)
    wrong = Draft(token_ids=draft.token_ids, num_draft_tokens=draft.num_draft_tokens, probs=probs)
    with pytest.raises(AssertionError, match=message):
        wrong.validate(INPUTS, VOCAB_SIZE)
    probs[0, 0] = 0
    probs[0, 0, 3] = 1
    wrong.validate(INPUTS, VOCAB_SIZE)
