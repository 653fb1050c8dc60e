"""What n-gram drafts, token for token: tables, a brute-force twin, and its cost in operations."""

import gc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proposers import registry
from proposers.ngram import NgramIndex, NgramProposer, continue_from
from tests.proposers.helpers import TinyRuntime, make_inputs, make_stream

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def tokens(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def drafted(proposer: NgramProposer, history: Sequence[int], k: int = 6) -> list[int]:
    draft = proposer.propose(make_inputs({"a": history}, k=k))
    return draft.token_ids[0, : draft.num_draft_tokens[0]].tolist()


def full(min_size: int = 2, max_size: int = 5) -> NgramProposer:
    """A proposer that always uses the whole allowance."""
    return NgramProposer(min_ngram_size=min_size, max_ngram_size=max_size, limit_by_match=False)


def brute_force(
    history: Sequence[int], k: int, min_size: int, max_size: int, limit: bool
) -> list[int]:
    """The rule, read aloud: longest suffix, then most recent earlier place, then copy."""
    known = list(history)
    for size in range(min(max_size, len(known) - 1), min_size - 1, -1):
        for start in range(len(known) - 1, size - 1, -1):
            if known[start - size : start] == known[len(known) - size :]:
                length = min(k, max(3, 2 * size - 1)) if limit and size < max_size else k
                for offset in range(length):
                    known.append(known[start + offset])
                return known[len(history) :]
    return []


@pytest.mark.parametrize(
    ("history", "draft"),
    [
        ("abcdefab", "cdefab"),  # one match
        ("abcdab", "cdabcd"),  # runs past the match into the newest tokens, and on into itself
        ("abcabdab", "dabdab"),  # most recent of two places, which makes a period of 3
        ("abcxabdyab", "dyabdy"),  # most recent (abd) wins over the first (abc)
        ("qabcxrabcyzbcwabc", "yzbcwa"),  # longest (abc) wins over the more recent bc
        ("aaa", "aaaaaa"),  # period 1
        ("abab", "ababab"),  # period 2
        ("abcde", ""),  # nothing came twice
        ("abca", ""),  # only one token matches, two are asked for
        ("a", ""),  # nothing to look in
        ("aa", ""),  # the suffix itself is no earlier occurrence
    ],
)
def test_table(history: str, draft: str) -> None:
    """Guards against another occurrence, another start or another end of the copy."""
    assert drafted(full(), tokens(history)) == tokens(draft)


@pytest.mark.parametrize(
    ("min_size", "max_size", "draft"),
    [
        (1, 1, "w"),  # c was last followed by w
        (1, 2, "w"),  # and bc too
        (1, 3, "y"),  # abc by y
        (3, 3, "y"),
        (4, 4, ""),  # zabc never came before
        (1, 64, "y"),  # sizes beyond the history do no harm
    ],
)
def test_sizes_choose_the_match(min_size: int, max_size: int, draft: str) -> None:
    """Guards against options that are read the wrong way round, or off by one."""
    history = tokens("abcybcwzabc")
    assert drafted(full(min_size, max_size), history, k=1) == tokens(draft)


@pytest.mark.parametrize(
    ("history", "draft"),
    [
        ("abcdefghijkya", "bcd"),  # 1 token matches: 3 drafts
        ("abcdefghijkyab", "cde"),  # 2: 3
        ("abcdefghijkyabc", "defgh"),  # 3: 5
        ("abcdefghijkyabcd", "efghijk"),  # 4: 7
        ("abcdefghijkyabcde", "fghijkyab"),  # 5, the largest size: no limit
        ("abcdefghijkyabcdef", "ghijkyabc"),
    ],
)
def test_short_matches_draft_less(history: str, draft: str) -> None:
    """Guards against wasted rows on weak matches, or a limit that also cuts strong ones."""
    assert drafted(NgramProposer(), tokens(history), k=9) == tokens(draft)
    assert drafted(NgramProposer(), tokens(history), k=2) == tokens(draft)[:2]
    assert len(drafted(full(1, 5), tokens(history), k=9)) == 9


@pytest.mark.parametrize("max_size", [1, 2, 3])
def test_match_of_the_largest_size_is_not_limited(max_size: int) -> None:
    """Guards against a small max_ngram_size that also cuts every draft short."""
    proposer = NgramProposer(min_ngram_size=1, max_ngram_size=max_size)
    assert drafted(proposer, tokens("abcdefghijkyabc"), k=9) == tokens("defghijky")


def test_match_lengths_are_those_of_the_ngrams() -> None:
    """Guards against rows whose matches are mixed up, or counted where nothing was drafted."""
    histories = {
        "one": tokens("abcdefghya"),
        "none": tokens("abcdefgh"),
        "six, five looked up": tokens("abcdefghyabcdef"),
        "not asked": tokens("abab"),
        "three": tokens("abcdefghyabc"),
    }
    inputs = make_inputs(histories, k=4, allowances=[4, 4, 4, 0, 1])
    draft = NgramProposer().propose(inputs)
    assert draft.match_lengths is not None
    assert draft.match_lengths.tolist() == [1, 0, 5, 0, 3]
    assert draft.num_draft_tokens.tolist() == [3, 0, 4, 0, 1]


@settings(max_examples=300)
@given(
    history=st.lists(st.integers(0, 1), min_size=1, max_size=40),
    cuts=st.lists(st.integers(1, 40), max_size=6),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted),
    k=st.sampled_from([0, 1, 2, 6, 16]),
    limit=st.booleans(),
)
def test_equals_brute_force_on_any_way_through_a_history(
    history: list[int], cuts: list[int], sizes: list[int], k: int, limit: bool
) -> None:
    """Guards against an index that depends on the steps, rollbacks included, that built it."""
    smallest, largest = sizes
    proposer = NgramProposer(min_ngram_size=smallest, max_ngram_size=largest, limit_by_match=limit)
    for cut in [*cuts, len(history)]:
        seen = history[:cut]
        assert drafted(proposer, seen, k) == brute_force(seen, k, smallest, largest, limit)


@given(
    histories=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), min_size=2, max_size=6)
)
def test_reused_request_id_starts_again(histories: list[list[int]]) -> None:
    """Guards against drafts from the text of an earlier request with the same id, of any length."""
    proposer = full(1, 4)
    for history in histories:
        assert drafted(proposer, history) == brute_force(history, 6, 1, 4, False)


@given(
    history=st.lists(st.integers(0, 9), min_size=1, max_size=20),
    start=st.integers(0, 19),
    num_tokens=st.integers(0, 50),
)
def test_copy_continues_into_itself(history: list[int], start: int, num_tokens: int) -> None:
    """Guards against a copy that stops, or reads beyond, the end of the history."""
    start %= len(history)
    grown = list(history)
    for offset in range(num_tokens):
        grown.append(grown[start + offset])
    copy = continue_from(np.array(history, dtype=np.int32), start, num_tokens)
    assert copy.tolist() == grown[len(history) :]


def test_work_is_linear_in_the_history_and_none_is_done_twice() -> None:
    """Guards against an index that is rebuilt, or searched through, on every step."""
    history = np.array(make_stream(0, 4000), dtype=np.int32)
    index = NgramIndex(2, 5)
    for num_tokens in range(1000, 4001, 3):
        index.update(history[:num_tokens])
        index.update(history[:num_tokens])
    # all but the last token, under 4 sizes each; the first 4 tokens end fewer n-grams
    assert index.num_writes == 3999 * 4 - (1 + 2 + 3 + 4)
    assert len(index) <= index.num_writes


def test_index_does_not_depend_on_the_step_size() -> None:
    """Guards against n-grams lost, or indexed twice, where two updates meet."""
    history = np.array(make_stream(1, 300), dtype=np.int32)
    at_once = NgramIndex(1, 6)
    at_once.update(history)
    for step in (1, 2, 3, 7, 50):
        index = NgramIndex(1, 6)
        for num_tokens in [*range(1, 300, step), 300]:
            index.update(history[:num_tokens])
        assert (index.num_writes, len(index)) == (at_once.num_writes, len(at_once))
        assert index.find(history) == at_once.find(history)


def num_indexes() -> int:
    """NgramIndex objects alive in this process."""
    return sum(type(thing) is NgramIndex for thing in gc.get_objects())


def test_forget_drops_the_index_of_that_request_only() -> None:
    """Guards against indexes of finished requests that stay for ever."""
    before, proposer = num_indexes(), NgramProposer()
    proposer.propose(make_inputs({"a": make_stream(0), "b": make_stream(1)}, k=2))
    assert num_indexes() == before + 2
    proposer.forget(["a", "unknown"])
    assert num_indexes() == before + 1
    proposer.forget(["b"])
    assert num_indexes() == before


def test_row_without_allowance_costs_nothing() -> None:
    """Guards against work for drafts that may not be used: max_tokens=1, drafting off (case 26)."""
    before, proposer = num_indexes(), NgramProposer()
    proposer.propose(make_inputs({"a": make_stream(0)}, k=6, allowances=[0]))
    assert num_indexes() == before


def test_text_without_repetition_is_never_drafted_for() -> None:
    """Guards against drafts, which cost time, where there is nothing to copy (case 53)."""
    history = np.random.default_rng(0).permutation(2000).tolist()
    proposer = NgramProposer()
    assert not any(drafted(proposer, history[:length]) for length in range(1, 2000, 37))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_ngram_size": 0}, "max_ngram_size=0: expected an integer from 1 to 64"),
        ({"max_ngram_size": 65}, "max_ngram_size=65"),
        ({"max_ngram_size": 2.0}, "max_ngram_size=2.0"),
        ({"min_ngram_size": True}, "min_ngram_size=True"),
        ({"min_ngram_size": 4, "max_ngram_size": 3}, "min_ngram_size=4: .* from 1 to 3"),
        ({"limit_by_match": 1}, "limit_by_match=1: expected True or False"),
        ({"max_draft": 6}, "no option 'max_draft'; its options are: max_ngram_size, min_ngram"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    """Guards against options that are clamped, or ignored, in silence (case 41)."""
    with pytest.raises(ValueError, match=message):
        registry.create("ngram", options, TinyRuntime())


def test_options_reach_the_proposer() -> None:
    """Guards against options that are accepted and dropped."""
    history = tokens("abcdefghcdxb")
    options = {"min_ngram_size": 1, "max_ngram_size": 2, "limit_by_match": False}
    built = registry.create("ngram", options, TinyRuntime())
    assert isinstance(built, NgramProposer)
    assert drafted(built, history) == tokens("cdefgh")
    default = registry.create("ngram", {}, TinyRuntime())
    assert isinstance(default, NgramProposer)
    assert drafted(default, history) == tokens("cde")
