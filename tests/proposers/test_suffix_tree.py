"""The suffix tree, node for node: against strings counted one by one; its cost in operations."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from proposers.suffix_tree import SuffixTree
from tests.proposers.helpers import make_stream

TOKENS = st.integers(0, 2)
TEXTS = st.lists(st.sampled_from([0, 0, 1, 1, 2, -1]), max_size=40)  # -1: between two texts


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def tree_of(text: list[int], max_match: int = 4) -> SuffixTree:
    tree = SuffixTree(max_match)
    tree.append(array(text))
    return tree


def find_aloud(text: list[int], tail: list[int], max_match: int) -> tuple[int, list[int]]:
    """The longest suffix of the tail that stands in the text with a token behind it, and where."""
    for size in range(min(max_match, len(tail)), 0, -1):
        ends = range(size, len(text))
        places = [end for end in ends if text[end - size : end] == tail[-size:]]
        if places:
            return size, places
    return 0, []


def count(text: list[int], string: list[int]) -> tuple[int, int]:
    """How often a string stands in the text, and where last."""
    starts = range(len(text) - len(string) + 1)
    found = [start for start in starts if text[start : start + len(string)] == string]
    return len(found), found[-1] if found else -1


def follow_aloud(
    text: list[int], string: list[int], num_tokens: int, least: float
) -> tuple[list[int], float]:
    """The path from a string in a text that ends with -1, every count taken anew."""
    path: list[int] = []
    score = 0.0
    while len(path) < num_tokens:
        number, _, token = max((*count(text, [*string, *path, token]), token) for token in range(3))
        probability = number / count(text, string)[0]
        if not number or probability < least:
            break
        path.append(token)
        score += probability
    return path, score


@settings(max_examples=200)
@given(
    steps=st.lists(st.tuples(TEXTS, st.integers(0, 50)), min_size=1, max_size=5),
    tail=st.lists(TOKENS, min_size=1, max_size=7),
    max_match=st.integers(1, 5),
)
def test_matches_equal_brute_force_on_any_way_to_a_text(
    steps: list[tuple[list[int], int]], tail: list[int], max_match: int
) -> None:
    """Guards against places lost, or left behind, where texts grow and lose their beginning."""
    tree, text = SuffixTree(max_match), list[int]()
    for more, keep in steps:
        tree.append(array(more))
        tree.keep_newest(keep)
        text = [*text, *more][len(text) + len(more) - min(keep, len(text) + len(more)) :]
        assert len(tree) == len(text)
        assert tree.num_places == tree_of(text).num_places
        size, places = tree.find(array(tail))
        assert (size, places.tolist()) == find_aloud(text, tail, max_match)


@settings(max_examples=300)
@given(
    text=TEXTS,
    tail=st.lists(TOKENS, min_size=1, max_size=7),
    num_tokens=st.integers(0, 6),
    least=st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0]),
)
def test_paths_equal_counted_strings(
    text: list[int], tail: list[int], num_tokens: int, least: float
) -> None:
    """Guards against a wrong count, parent, tie or end of a path, or one across two texts."""
    text = [*text, -1]
    tree = tree_of(text)
    size, places = tree.find(array(tail))
    if size:
        path, score = tree.follow(places, num_tokens, least)
        expected, total = follow_aloud(text, tail[len(tail) - size :], num_tokens, least)
        assert path == expected
        assert abs(score - total) < 1e-9


@given(period=st.lists(TOKENS, min_size=1, max_size=5), num_tokens=st.integers(1, 20))
def test_a_text_that_repeats_goes_on_repeating(period: list[int], num_tokens: int) -> None:
    """Guards against a path that stops at the end of the text, where loops need it to go on."""
    text = period * 12
    tree = tree_of(text, max_match=30)
    _, places = tree.find(array(text))
    path, score = tree.follow(places, num_tokens, 0.1)
    assert path == (period * 20)[:num_tokens]
    assert score == num_tokens


def test_work_is_linear_in_the_text_and_none_is_done_twice() -> None:
    """Guards against a tree that is rebuilt, or searched through, on every step."""
    history = array(make_stream(0, 4000))
    tree = SuffixTree(24)
    for num_tokens in range(1000, 4001, 3):
        tree.append(history[len(tree) : num_tokens])
        tree.append(history[len(tree) : num_tokens])
    # all but the last token, under 2 sizes each; the first ends only one string
    assert tree.num_writes == tree.num_places == 3999 * 2 - 1


def test_the_size_of_a_bounded_tree_does_not_grow_with_what_it_has_seen() -> None:
    """Guards against entries of dropped tokens that pile up."""
    tree = SuffixTree(24)
    for index in range(60):
        tree.append(array([*make_stream(index), -1]))
        tree.keep_newest(500)
        assert len(tree) <= 500
        assert tree.num_places <= 2 * len(tree)
    tree.keep_newest(0)
    assert (len(tree), tree.num_places) == (0, 0)


def test_of_very_many_places_the_newest_count() -> None:
    """Guards against a look-up whose cost grows with a text that says one thing all the time."""
    text = [1, 2] * 300 + [1, 3] * 256 + [1]
    size, places = tree_of(text, max_match=1).find(array(text))
    assert (size, len(places)) == (1, 256)
    assert {text[place] for place in places} == {3}


def test_is_start_of_tells_a_grown_text_from_another() -> None:
    """Guards against drafts from tokens that are gone."""
    tree = tree_of([1, 2, 3])
    for tokens, expected in (
        ([1, 2, 3], True),
        ([1, 2, 3, 4], True),
        ([1, 2], False),
        ([2, 2, 3, 4], False),
    ):
        assert tree.is_start_of(array(tokens)) is expected
