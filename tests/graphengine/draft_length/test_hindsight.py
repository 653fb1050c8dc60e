"""Drafts judged by what came, verified or not."""

from graphengine.draft_length.hindsight import Hindsight


def test_a_draft_is_accepted_as_far_as_it_came_true() -> None:
    hindsight = Hindsight()
    assert hindsight.judge("a", [1]) is None
    hindsight.expect("a", [1, 2, 3])
    assert hindsight.judge("a", [1]) == []  # so far so good
    assert hindsight.judge("a", [2, 9]) == [(3, 2)]
    assert hindsight.judge("a", [3]) is None


def test_drafts_of_several_steps_wait_together() -> None:
    """A plain step after another: each teaches, though none was verified."""
    hindsight, text = Hindsight(), [5, 6, 7, 8, 9, 10]
    found = []
    for place in range(4):
        hindsight.expect("a", text[place : place + 3])
        found += hindsight.judge("a", [text[place]]) or []
    assert found == [(3, 3), (3, 3)]
    assert hindsight.judge("a", [0]) == [(3, 2), (3, 1)]


def test_all_at_once_and_a_first_miss() -> None:
    hindsight = Hindsight()
    hindsight.expect("a", [1, 2])
    assert hindsight.judge("a", [1, 2, 3]) == [(2, 2)]
    hindsight.expect("a", [1, 2])
    assert hindsight.judge("a", [4]) == [(2, 0)]


def test_who_is_gone_is_forgotten() -> None:
    hindsight = Hindsight()
    hindsight.expect("a", [1])
    hindsight.expect("b", [1])
    hindsight.forget(["a", "unknown"])
    assert hindsight.judge("a", [1]) is None
    assert hindsight.judge("b", [1]) == [(1, 1)]
