"""What suffix drafts, token for token, and what the shared tree learns, from whom and when."""

import gc
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from proposers import registry
from proposers.base import Commit
from proposers.suffix import SuffixProposer
from proposers.suffix_tree import SuffixTree
from tests.proposers.helpers import VOCAB_SIZE, TinyRuntime, make_inputs, make_stream

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def tokens(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def drafted(proposer: SuffixProposer, history: str, k: int = 6, request_id: str = "a") -> str:
    draft = proposer.propose(make_inputs({request_id: tokens(history)}, k=k))
    ids = draft.token_ids[0, : draft.num_draft_tokens[0]].tolist()
    return "".join(LETTERS[token] for token in ids)


def commit(proposer: SuffixProposer, request_id: str, *blocks: str) -> None:
    for block in blocks:
        proposer.on_commit(
            Commit(request_ids=[request_id], token_ids=[tokens(block)], num_accepted=[0])
        )


def serve(proposer: SuffixProposer, request_id: str, prompt: str, *blocks: str) -> None:
    """A whole life: drafts, blocks of output, the end."""
    history = prompt
    for block in blocks:
        drafted(proposer, history, request_id=request_id)
        commit(proposer, request_id, block)
        history += block
    proposer.forget([request_id])


@pytest.mark.parametrize(
    ("history", "draft"),
    [
        ("abcdefghijkya", "bcd"),  # 1 token matches: 3 drafts
        ("abcdefghijkyab", "cdef"),  # 2: 4
        ("abcdefghijkyabcd", "efghijky"),  # 4: 8
        ("abcabcabdab", "cabd"),  # ab was followed by c twice, by d once; abcab by c and d: last
        ("abcxabdyab", "dyab"),  # of equal counts the last place wins
        ("qabcxbcybcybcyabc", "xbcybc"),  # bc was followed by y thrice, but abc by x
        ("aaa", "aaaa"),  # goes on into itself
        ("ababab", "abababab"),
        ("abcde", ""),
        ("a", ""),
    ],
)
def test_table(history: str, draft: str) -> None:
    """Guards against another match, another path or another end of it."""
    assert drafted(SuffixProposer(), history, k=8) == draft
    assert drafted(SuffixProposer(), history, k=2) == draft[:2]


@pytest.mark.parametrize(
    ("factor", "lengths"), [(0, (3, 3, 3)), (1, (3, 3, 4)), (2.5, (3, 5, 9)), (64, (9, 9, 9))]
)
def test_factor_bounds_the_draft_by_the_match(factor: float, lengths: tuple[int, ...]) -> None:
    """Guards against wasted rows on weak matches, or a limit that also cuts strong ones."""
    for match, length in zip(("a", "ab", "abcd"), lengths, strict=True):
        proposer = SuffixProposer(draft_factor=factor)
        assert len(drafted(proposer, "abcdefghijklmny" + match, k=9)) == length


@pytest.mark.parametrize(("least", "draft"), [(0.0, "bcdx"), (0.5, "bcd"), (0.51, "bc"), (1.0, "")])
def test_path_ends_where_it_has_become_unlikely(least: float, draft: str) -> None:
    """Guards against drafts after a fork that is anybody's guess."""
    # behind xa: b in 3 of 4, bc in 3, bcd in 2, then one each
    history = "xabcdwxabcdxxabcqxazzxa"
    assert drafted(SuffixProposer(min_probability=least), history, k=4) == draft


@pytest.mark.parametrize(("least", "draft"), [(1, "bcd"), (2, "")])
def test_shortest_match_that_may_draft(least: int, draft: str) -> None:
    """Guards against an option that is off by one."""
    assert drafted(SuffixProposer(min_match_length=least), "abcdeya", k=3) == draft
    assert drafted(SuffixProposer(min_match_length=2), "abcdeyab", k=3) == "cde"


def test_longest_match_that_is_looked_up() -> None:
    """Guards against a match that is longer than was asked for, and tells two places apart."""
    history = "qabcxrabcyqabc"
    assert drafted(SuffixProposer(), history, k=1) == "x"  # qabc
    assert drafted(SuffixProposer(max_match_length=3), history, k=1) == "y"  # abc, the last


def test_outputs_of_requests_that_are_gone_are_learnt() -> None:
    """Guards against a shared tree that nothing enters, or that is never looked at."""
    proposer = SuffixProposer()
    serve(proposer, "first", "zz", "ab", "cdef", "gh")
    assert drafted(proposer, "xyabc", request_id="second") == "defg"  # 3 tokens count as 2
    assert drafted(proposer, "xyc", request_id="third") == ""  # one token is no evidence


def test_nothing_is_learnt_where_the_shared_tree_is_off() -> None:
    """Guards against text that reaches another request though the user has turned that off."""
    proposer = SuffixProposer(shared_tree_tokens=0)
    serve(proposer, "first", "zz", "ab", "cdef", "gh")
    assert drafted(proposer, "xyabc", request_id="second") == ""


def test_a_request_with_a_cache_salt_neither_learns_nor_teaches() -> None:
    """Guards against the time an answer takes telling of what somebody with a salt was given."""
    proposer = SuffixProposer()

    def drafts(history: str, salt: str | None) -> list[int]:
        inputs = replace(make_inputs({"a": tokens(history)}, k=6), cache_salts=[salt])
        draft = proposer.propose(inputs)
        return draft.token_ids[0, : draft.num_draft_tokens[0]].tolist()

    for salt, output in (("secret", "bcdefg"), (None, "uvwxyz")):
        drafts("a", salt)
        commit(proposer, "a", output)
        proposer.forget(["a"])
    assert drafts("mbcd", None) == []
    proposer.forget(["a"])
    assert drafts("muvw", "secret") == []
    proposer.forget(["a"])
    assert drafts("muvw", None) == tokens("xyz")


def test_prompts_running_requests_and_unread_ones_are_not_learnt() -> None:
    """Guards against prompts that show in what others are drafted, and outputs taken too early."""
    proposer = SuffixProposer()
    serve(proposer, "prompt", "abcdefgh", "q")
    assert drafted(proposer, "xyabc", request_id="one") == ""
    drafted(proposer, "zz", request_id="running")
    commit(proposer, "running", "abcdefgh")
    assert drafted(proposer, "xyabc", request_id="two") == ""
    commit(proposer, "never-drafted-for", "abcdefgh")
    proposer.forget(["never-drafted-for"])
    assert drafted(proposer, "xyabc", request_id="three") == ""


def test_the_better_score_wins() -> None:
    """Guards against a tree that always goes first, or text of others where the own is as good."""
    for learnt, history, draft in (
        ("abcdefgh", "xycqyabc", "defg"),  # its own: c, then only q y a
        ("abcdefgh", "abcxyzwuabc", "xyzwua"),  # its own match drafts 6, the same one there 4
        ("mbcdefgh", "bcxyzwmbc", "xyzw"),  # both 4
    ):
        proposer = SuffixProposer()
        serve(proposer, "first", "zz", learnt)
        assert drafted(proposer, history, request_id="second") == draft


def test_match_lengths_are_those_of_the_tree_that_drafts() -> None:
    """Guards against rows whose matches are mixed up, or counted where nothing was drafted."""
    proposer = SuffixProposer(max_match_length=4)
    serve(proposer, "first", "zz", "mnopqrst")
    histories = {
        "one": tokens("abcdefghya"),
        "none": tokens("abcdefgh"),
        "five, four looked up": tokens("abcdefghyabcde"),
        "not asked": tokens("abab"),
        "three, of another": tokens("abmno"),
        "one, of another": tokens("abm"),
    }
    inputs = make_inputs(histories, k=4, allowances=[4, 4, 4, 0, 1, 4])
    draft = proposer.propose(inputs)
    draft.validate(inputs, VOCAB_SIZE)
    assert draft.match_lengths is not None
    assert draft.match_lengths.tolist() == [1, 0, 4, 0, 3, 0]
    assert draft.num_draft_tokens.tolist() == [3, 0, 4, 0, 1, 0]


def test_strings_do_not_go_across_two_outputs() -> None:
    """Guards against drafts that join the end of one request to the beginning of the next."""
    proposer = SuffixProposer()
    serve(proposer, "first", "zz", "mab")
    serve(proposer, "second", "zz", "cdef")
    assert drafted(proposer, "xymab", request_id="third") == ""
    assert drafted(proposer, "xma", request_id="fourth") == "b"


def test_preempted_request_is_not_counted_twice() -> None:
    """Guards against counts that grow with every preemption, resumption and start over."""
    proposer = SuffixProposer()
    drafted(proposer, "zz", request_id="first")
    commit(proposer, "first", "abc")
    for _ in range(3):
        proposer.forget(["first"])
        drafted(proposer, "zzabc", request_id="first")
    commit(proposer, "first", "d")
    proposer.forget(["first", "first"])
    serve(proposer, "second", "zz", "abd")
    # ab was followed by c once and by d once, the latter last; counted twice, c would win
    assert drafted(proposer, "xyab", k=1, request_id="third") == "d"


def test_the_oldest_outputs_go_first() -> None:
    """Guards against a shared tree that grows for ever, or that drops what is new."""
    proposer = SuffixProposer(shared_tree_tokens=10)
    serve(proposer, "first", "zz", "abcd")
    serve(proposer, "second", "zz", "efgh")
    assert drafted(proposer, "xyab", k=2, request_id="a") == "cd"
    serve(proposer, "third", "zz", "ijkl")
    assert drafted(proposer, "xyab", k=2, request_id="b") == ""
    assert drafted(proposer, "xyef", k=2, request_id="c") == "gh"
    assert drafted(proposer, "xyij", k=2, request_id="d") == "kl"


def test_same_calls_give_same_drafts() -> None:
    """Guards against drafts from hidden randomness, the shared tree's included."""
    draw = random.Random(0)
    twins = [SuffixProposer(shared_tree_tokens=150) for _ in range(2)]
    streams = {f"r{index}": make_stream(index % 3, 90) for index in range(30)}
    places = dict.fromkeys(streams, 4)
    num_drafts = 0
    for _ in range(150):
        ids = draw.sample(sorted(streams), 3)
        histories = {name: streams[name][: places[name]] for name in ids}
        blocks = {name: streams[name][places[name] : places[name] + 3] for name in ids}
        gone = [name for name in ids if draw.random() < 0.2]
        drafts = []
        for twin in twins:
            drafts.append(twin.propose(make_inputs(histories, k=6)).token_ids.tolist())
            twin.on_commit(
                Commit(request_ids=ids, token_ids=[*blocks.values()], num_accepted=[2] * 3)
            )
            twin.forget(gone)
        assert drafts[0] == drafts[1]
        num_drafts += sum(token >= 0 for row in drafts[0] for token in row)
        for name in ids:
            places[name] += len(blocks[name])
    assert num_drafts > 100


def test_commit_is_copied() -> None:
    """Guards against a shared tree that learns what the engine writes into its lists later."""
    proposer = SuffixProposer()
    drafted(proposer, "zz", request_id="first")
    block = tokens("abcd")
    proposer.on_commit(Commit(request_ids=["first"], token_ids=[block], num_accepted=[0]))
    block[:] = tokens("efgh")
    proposer.forget(["first"])
    assert drafted(proposer, "xyab", k=2, request_id="second") == "cd"


def num_trees() -> int:
    """SuffixTree objects alive in this process."""
    return sum(type(thing) is SuffixTree for thing in gc.get_objects())


def test_forget_drops_the_tree_of_that_request_only() -> None:
    """Guards against trees of finished requests that stay for ever."""
    proposer = SuffixProposer()
    before = num_trees()
    histories: dict[str, Sequence[int]] = {"a": make_stream(0), "b": make_stream(1)}
    proposer.propose(make_inputs(histories, k=2))
    assert num_trees() == before + 2
    proposer.forget(["a", "unknown"])
    assert num_trees() == before + 1
    proposer.forget(["b"])
    assert num_trees() == before


def test_row_without_allowance_costs_nothing() -> None:
    """Guards against work for drafts that may not be used: max_tokens=1, drafting off (case 26)."""
    proposer = SuffixProposer()
    before = num_trees()
    proposer.propose(make_inputs({"a": make_stream(0)}, k=6, allowances=[0]))
    assert num_trees() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_match_length": 65}, "max_match_length=65: expected an integer from 1 to 64"),
        ({"min_match_length": 4, "max_match_length": 3}, "min_match_length=4: .* from 1 to 3"),
        ({"draft_factor": -0.5}, "draft_factor=-0.5: expected a number from 0 to 64"),
        ({"draft_factor": float("nan")}, "draft_factor=nan"),
        ({"min_probability": 1.01}, "min_probability=1.01: expected a number from 0 to 1"),
        ({"min_probability": True}, "min_probability=True"),
        (
            {"shared_tree_tokens": -1},
            "shared_tree_tokens=-1: expected an integer from 0 to 16777216",
        ),
        ({"max_tree_depth": 6}, "no option 'max_tree_depth'; its options are: max_match_length, "),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    """Guards against options that are clamped, or ignored, in silence (case 41)."""
    with pytest.raises(ValueError, match=message):
        registry.create("suffix", options, TinyRuntime())


def test_options_reach_the_proposer() -> None:
    """Guards against options that are accepted and dropped, and defaults that are two things."""
    history = "xabcdwxabcdxxabcqxazzxa"
    for options, draft in (
        ({}, "bcdx"),
        ({"min_probability": 0.5}, "bcd"),
        ({"draft_factor": 1}, "bcd"),
        ({"min_match_length": 3}, ""),
        ({"max_match_length": 1}, "bcd"),
    ):
        built = registry.create("suffix", options, TinyRuntime())
        assert isinstance(built, SuffixProposer)
        assert drafted(built, history, k=4) == draft
    for given, learnt in (({}, "cd"), ({"shared_tree_tokens": 0}, "")):
        built = registry.create("suffix", given, TinyRuntime())
        assert isinstance(built, SuffixProposer)
        serve(built, "first", "zz", "abcd")
        assert drafted(built, "xyab", k=2, request_id="second") == learnt
