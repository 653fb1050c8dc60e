"""What must never become a silent wrong answer: each guard has a planted fault."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.graphengine.attention.flashinfer_double import (
    SIZES,
    NativeDouble,
    make_attention,
    make_rows,
)


class Copying:
    """A fence of a device that is late: nothing has passed until somebody waits."""

    def __init__(self, *, waits: bool = True) -> None:
        self._waits = waits
        self.is_passed = True
        self.num_waits = 0

    def record(self) -> None:
        self.is_passed = False

    def synchronize(self) -> None:
        self.num_waits += 1
        self.is_passed = self.is_passed or self._waits


@pytest.mark.parametrize("place", range(15))
def test_a_changed_plan_is_an_error(native: NativeDouble, place: int) -> None:
    """A graph keeps the launch of the first plan; with another schedule it would read garbage."""
    attention, rows = make_attention(), make_rows([(5, 2), (9, 2)])
    for _ in range(2):
        attention.plan(rows.batch, rows.host)
    native.planted = {place: 99}
    with pytest.raises(AssertionError, match=r"the plan changed from .* to .*99.*garbage"):
        attention.plan(rows.batch, rows.host)
    with pytest.raises(AssertionError, match="planned was None"):
        attention.run(rows.out(), rows.qkv, rows.cache, rows.batch)
    native.planted = {}
    attention.plan(rows.batch, rows.host)


@pytest.mark.parametrize("planted", [{3: 64}, {3: 16}, {14: 1}])
def test_a_first_plan_outside_the_recipe_is_an_error(
    native: NativeDouble, planted: dict[int, int]
) -> None:
    """Another q tile, or split keys, at capture: bits would change with the batch."""
    native.planted = planted
    rows = make_rows([(5, 2)])
    with pytest.raises(AssertionError, match=r"q tile than 128 or splits the keys"):
        make_attention().plan(rows.batch, rows.host)


def test_the_pinned_mirror_is_not_rewritten_while_it_is_read(native: NativeDouble) -> None:
    """A plan waits for the copies of the plan before it; without the wait, the planner is called
    too early, which the double notices.
    """
    rows = make_rows([(5, 2), (9, 2)])
    for waits in (True, False):
        fence = Copying(waits=waits)
        attention = make_attention(make_fence=lambda fence=fence: fence)

        def in_time(fence: Copying = fence) -> None:
            assert fence.is_passed, "the mirror is still being copied"

        native.before_plan = in_time
        attention.plan(rows.batch, rows.host)
        assert not fence.is_passed, "no event behind the plan"
        if waits:
            attention.plan(rows.batch, rows.host)
            assert fence.num_waits == 2
        else:
            with pytest.raises(AssertionError, match="still being copied"):
                attention.plan(rows.batch, rows.host)


def test_host_arrays_are_copied_before_plan_returns(native: NativeDouble) -> None:
    """The engine rewrites its arrays for the next step while this one is under way."""
    rows, attention = make_rows([(5, 2), (9, 2)]), make_attention()
    expected = rows.reference()
    host = replace(
        rows.host,
        block_table=rows.host.block_table.copy(),
        query_start_loc=rows.host.query_start_loc.copy(),
        seq_lens=rows.host.seq_lens.copy(),
    )
    attention.plan(rows.batch, host)
    for array in (host.block_table, host.query_start_loc, host.seq_lens):
        array[:] = 99
    out = rows.out()
    attention.run(out, rows.qkv, rows.cache, rows.batch)
    assert torch.equal(out, expected)


def test_a_run_without_its_plan_is_an_error(native: NativeDouble) -> None:
    """Guards against a forward over the page lists of another batch."""
    attention = make_attention()
    cell, other = make_rows([(5, 2)]), make_rows([(5, 1), (3, 1)])
    with pytest.raises(AssertionError, match="planned was None"):
        attention.run(cell.out(), cell.qkv, cell.cache, cell.batch)
    attention.plan(other.batch, other.host)
    with pytest.raises(AssertionError, match=r"\(1, 2, 2\) runs, planned was \(2, 1, 2\)"):
        attention.run(cell.out(), cell.qkv, cell.cache, cell.batch)


def test_more_rows_or_pages_than_the_wrapper_has_are_an_error(native: NativeDouble) -> None:
    """Guards against a length that the host got wrong, before anything is written."""
    attention, rows = make_attention(), make_rows([(5, 2)])
    attention.plan(rows.batch, rows.host)
    too_long = replace(rows.host, seq_lens=np.array([4 * SIZES.max_blocks + 9], dtype=np.int32))
    with pytest.raises(AssertionError, match="pages; a wrapper of 1 requests has room"):
        attention.plan(rows.batch, too_long)
    wrong = replace(rows.host, query_start_loc=np.array([0, 3], dtype=np.int32))
    with pytest.raises(AssertionError, match="3 rows on the host, 2 in the batch"):
        attention.plan(rows.batch, wrong)
    wrapper = attention._cells[1, 2]
    count = wrapper._capacity + 1
    many = replace(
        rows.host,
        query_start_loc=np.array([0, count], dtype=np.int32),
        seq_lens=np.array([count], dtype=np.int32),
    )
    with pytest.raises(AssertionError, match=f"{count} rows and .* room for {count - 1} and"):
        wrapper.plan(many)
    assert len(native.plans) == 1


def test_a_length_below_the_rows_is_an_error(native: NativeDouble) -> None:
    """Guards against rows before position 0, which would see no key at all."""
    rows = make_rows([(0, 2)])
    short = replace(rows.host, seq_lens=np.array([1], dtype=np.int32))
    with pytest.raises(AssertionError, match="aligned to the end"):
        make_attention().plan(rows.batch, short)


def test_only_a_cell_of_the_table_gets_a_wrapper_of_its_own(native: NativeDouble) -> None:
    """Guards against buffers that grow with every length of prompt."""
    attention = make_attention()
    for count in (3, 5, 6, 7, 9, 11, 4, 2, 1):
        rows = make_rows([(0, count)])
        attention.plan(rows.batch, rows.host)
    assert sorted(attention._cells) == [(1, 1), (1, 2), (1, 4)]
