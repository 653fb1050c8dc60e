"""Stop strings: the same end for any split of the text, and no beginning of one given out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphengine.models.stop_strings import end_at_stop, num_held

TEXT = st.text(alphabet="ab.", max_size=12)
STOPS = st.lists(st.text(alphabet="ab.", min_size=1, max_size=4), min_size=1, max_size=3)


@pytest.mark.parametrize(
    ("text", "stops", "include", "kept"),
    [
        ("one two", ["two", "ne"], False, "o"),
        ("one two", ["two", "ne"], True, "one"),
        ("abc", ["b", "bc"], True, "abc"),
        ("abc", ["bc", "b"], False, "a"),
        ("abc", ["x"], False, None),
        ("x", ["x"], False, ""),
    ],
)
def test_the_first_match_ends_the_text(
    text: str, stops: list[str], include: bool, kept: str | None
) -> None:
    """Guards an end by a later stop, or one character off."""
    end = end_at_stop(text, stops, include=include)
    assert (None if end is None else text[:end]) == kept


@given(text=TEXT, stops=STOPS)
def test_what_is_held_is_the_longest_beginning_of_a_stop(text: str, stops: list[str]) -> None:
    """Guards a stream that gives out nothing before the end."""
    beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
    fitting = [len(one) for one in beginnings if text.endswith(one)]
    assert num_held(text, stops) == max(fitting, default=0)


def test_matches_that_were_there_before_do_not_count() -> None:
    """Guards a stop before min_tokens that is held as the beginning of another one."""
    assert end_at_stop("ac", ["a", "ab"], include=False, beyond=1) is None
    assert end_at_stop("aa", ["a"], include=False, beyond=1) == 1
    assert end_at_stop("xab", ["ab", "a"], include=True, beyond=2) == 3


@given(pieces=st.lists(TEXT, max_size=6), stops=STOPS)
def test_pieces_give_what_the_whole_gives(pieces: list[str], stops: list[str]) -> None:
    """Guards a stop that spans two pieces, and text given out that belonged to it."""
    given_out, held = "", ""
    for piece in pieces:
        text = held + piece
        end = end_at_stop(text, stops, include=False)
        if end is not None:
            given_out += text[:end]
            break
        keep = len(text) - num_held(text, stops)
        given_out, held = given_out + text[:keep], text[keep:]
    whole = "".join(pieces)
    end = end_at_stop(whole, stops, include=False)
    if end is None:
        assert given_out + held == whole
    else:
        assert whole.startswith(given_out)
        assert not any(stop in given_out for stop in stops)
