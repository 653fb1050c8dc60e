"""The identity report: what is compared, and the cause that it names where speculation loses."""

import itertools
from typing import Any

import pytest

from profiles.identity import (
    LEVELS,
    NUM_SMOKE_CELLS,
    cause,
    compare,
    pairwise_cells,
    step_cost,
    total,
)


def _pass(seconds: float, num_steps: int, drafted: int = 0, accepted: int = 0) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "tokens_per_second": 1000 / seconds,
        "num_steps": num_steps,
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
        "padding_rows": 150,
    }


def test_the_cause_says_what_a_step_costs_and_what_it_saves() -> None:
    """Guards against a text that blames padding where the price of a step is what lost."""
    off, on = _pass(100.0, 1000), _pass(120.0, 600, drafted=500, accepted=400)
    assert step_cost(on, off) == pytest.approx(2.0)
    assert cause(on, off) == (
        "40% of the steps saved, but a step costs 2.00 plain ones, which pays from 50% on; "
        "80% of 500 drafts accepted, 0.2 padding rows a step"
    )


def test_no_cause_where_nothing_is_lost() -> None:
    """Guards against an excuse for a win, and against a division by zero without drafts."""
    off = _pass(100.0, 1000)
    assert cause(_pass(80.0, 600), off) == ""
    assert cause(_pass(101.0, 1000), off).startswith("no step saved (1000 against 1000); 0% of 0")


def test_compare_counts_every_token_that_is_not_the_reference() -> None:
    """Guards against a stream that is longer or shorter and passes for the same."""
    reference = [[1, 2, 3], [4, 5], [6]]
    assert compare(reference, reference) == []
    assert compare(reference, [[1, 9, 3], [4, 5, 6], [6]]) == [
        {"prompt": 0, "position": 1, "tokens": 2},
        {"prompt": 1, "position": 2, "tokens": 1},
    ]


def test_total_adds_up_all_cells() -> None:
    """Guards against a last line that overlooks a cell that differs or compiles late."""
    row = {
        "num_tokens": 10, "differing_off": [], "differing_on": [], "ratio": 1.5,
        "compile_events_after_warmup": 0,
    }  # fmt: skip
    bad = {**row, "ratio": 0.5, "differing_on": [{"tokens": 3}], "compile_events_after_warmup": 1}
    assert total([row, bad, row]) == {
        "num_tokens": 30, "differing_off": 0, "differing_on": 3, "lowest_ratio": 0.5,
        "highest_ratio": 1.5, "compile_events": 1,
    }  # fmt: skip


def test_cells_cover_every_pair_of_levels() -> None:
    """Guards against a combination that no cell runs."""
    cells = pairwise_cells()
    for first, second in itertools.combinations(LEVELS, 2):
        seen = {(getattr(cell, first), getattr(cell, second)) for cell in cells}
        assert seen == set(itertools.product(LEVELS[first], LEVELS[second]))


def test_the_smoke_cells_have_every_graph_kind_and_setting() -> None:
    """Guards against a CI run that never meets one kind of graph, or a prefix cache."""
    cells = pairwise_cells()[:NUM_SMOKE_CELLS]
    for factor in ("graph", "chunked_prefill", "prefix_caching"):
        assert {getattr(cell, factor) for cell in cells} == set(LEVELS[factor])
    assert {1, 16} <= {cell.max_num_seqs for cell in cells}
