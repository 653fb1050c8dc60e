"""ShapeTable: every batch that can be formed has a cell that holds it."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.config import CaptureConfig
from capture.shapes import ShapeKey, ShapeTable, default_num_reqs

TIERS = ("greedy", "sampled")


def table(
    config: CaptureConfig | None = None, *, max_num_seqs: int = 16, max_draft_tokens: int = 6
) -> ShapeTable:
    return ShapeTable.from_config(
        config or CaptureConfig(),
        max_num_seqs=max_num_seqs,
        max_draft_tokens=max_draft_tokens,
        tiers=TIERS,
    )


def assert_every_batch_has_its_smallest_cell(shapes: ShapeTable) -> None:
    cells = set(shapes)
    for n in range(1, shapes.num_reqs[-1] + 1):
        for k in range(shapes.draft_lengths[-1] + 1):
            key = shapes.dispatch(n, k, "greedy")
            assert key in cells
            assert key.tier == "greedy"
            assert key.num_tokens >= n * (1 + k)
            smallest = min(
                (cell.num_reqs, cell.query_len)
                for cell in cells
                if cell.num_reqs >= n and cell.query_len > k and cell.tier == "greedy"
            )
            assert (key.num_reqs, key.query_len) == smallest


# Case 16: 42 and 132 rows are sizes that token-counted ladders round away.
@pytest.mark.parametrize(
    ("max_num_seqs", "max_draft_tokens"), [(6, 6), (33, 3), (1, 3), (16, 6), (1, 0), (100, 2)]
)
def test_no_batch_of_the_grid_is_left_without_a_cell(
    max_num_seqs: int, max_draft_tokens: int
) -> None:
    """Guards against the largest decode batches silently running eager."""
    shapes = table(max_num_seqs=max_num_seqs, max_draft_tokens=max_draft_tokens)
    assert_every_batch_has_its_smallest_cell(shapes)
    largest = shapes.dispatch(max_num_seqs, max_draft_tokens, "sampled")
    assert largest.num_tokens == max_num_seqs * (1 + max_draft_tokens)


@given(st.data())
def test_no_ladder_leaves_a_batch_without_a_cell(data: st.DataObject) -> None:
    """Guards against user ladders with holes, without the maximum, or out of order."""
    max_num_seqs = data.draw(st.integers(1, 40))
    max_draft_tokens = data.draw(st.integers(0, 8))

    def ladder(low: int, high: int) -> Any:
        entries = st.lists(st.integers(low, high), min_size=1, max_size=6).map(tuple)
        return data.draw(st.none() | entries)

    config = CaptureConfig(
        num_reqs=ladder(1, max_num_seqs), draft_lengths=ladder(0, max_draft_tokens)
    )
    shapes = table(config, max_num_seqs=max_num_seqs, max_draft_tokens=max_draft_tokens)
    assert 0 in shapes.draft_lengths
    assert max_draft_tokens in shapes.draft_lengths
    assert max_num_seqs in shapes.num_reqs
    assert_every_batch_has_its_smallest_cell(shapes)


def test_cells_come_largest_first_and_once() -> None:
    """Guards the order that lets one memory pool, sized by the first capture, serve all."""
    keys = list(table())
    assert keys[0].num_tokens == 16 * 7
    assert [key.num_tokens for key in keys] == sorted((k.num_tokens for k in keys), reverse=True)
    assert len(set(keys)) == len(keys) == len(table())


def test_default_ladders() -> None:
    shapes = table(max_num_seqs=16, max_draft_tokens=6)
    assert shapes.num_reqs == (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
    assert shapes.draft_lengths == (0, 1, 2, 3, 6)
    assert table(max_num_seqs=6, max_draft_tokens=4).num_reqs == (1, 2, 3, 4, 5, 6)
    assert table(max_num_seqs=6, max_draft_tokens=4).draft_lengths == (0, 1, 2, 3, 4)
    assert default_num_reqs(100)[12:] == (20, 24, 28, 32, 40, 48, 56, 64, 80, 96)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CaptureConfig(num_reqs=(1, 32)), r"num_reqs: 32 is above max_num_seqs=16"),
        (CaptureConfig(draft_lengths=(7,)), r"draft_lengths: 7 is above max_draft_tokens=6"),
    ],
)
def test_a_ladder_above_the_engine_maximum_is_refused(config: CaptureConfig, message: str) -> None:
    """Guards against cells that are captured, paid for, and never used."""
    with pytest.raises(ValueError, match=message):
        table(config)


@pytest.mark.parametrize(
    "sizes",
    [
        {"max_num_seqs": 0, "max_draft_tokens": 0, "tiers": TIERS},
        {"max_num_seqs": 1, "max_draft_tokens": -1, "tiers": TIERS},
        {"max_num_seqs": 1, "max_draft_tokens": 0, "tiers": ()},
    ],
)
def test_an_empty_table_is_refused(sizes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="shape table needs"):
        ShapeTable.from_config(CaptureConfig(), **sizes)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((0, 0, "greedy"), "0 requests"),
        ((17, 0, "greedy"), "17 requests"),
        ((1, 7, "greedy"), "7 drafts"),
        ((1, -1, "greedy"), "-1 drafts"),
    ],
)
def test_a_batch_outside_the_table_fails_loudly(batch: tuple[int, int, str], message: str) -> None:
    """Guards against a wrap-around to some other cell."""
    with pytest.raises(AssertionError, match=message):
        table().dispatch(*batch)


def test_keys_are_frozen_hashable_and_ordered() -> None:
    """Guards case 15: the key is the whole identity of a cell, and cannot change under a graph."""
    key = ShapeKey(4, 3, "greedy")
    with pytest.raises(dataclasses.FrozenInstanceError):
        key.num_reqs = 8  # type: ignore[misc]
    assert {key: 1}[ShapeKey(4, 3, "greedy")] == 1
    others = [ShapeKey(2, 3, "greedy"), ShapeKey(4, 2, "greedy"), ShapeKey(4, 3, "sampled")]
    assert len({key, *others}) == 4
    assert sorted([key, *others])[0] == ShapeKey(2, 3, "greedy")
    assert str(key) == "4x3:greedy"
    assert key.num_tokens == 12


def test_zero_drafts_never_land_in_a_drafting_cell_and_back() -> None:
    """Guards case 15: a graph of draft length 0 replayed for a batch that carries drafts."""
    shapes = table()
    assert all(shapes.dispatch(n, 0, "greedy").query_len == 1 for n in range(1, 17))
    assert all(shapes.dispatch(n, 1, "greedy").query_len == 2 for n in range(1, 17))
