"""What successor drafts, token for token, and what the shared table learns, from whom and when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proposers import registry
from proposers.base import Commit
from proposers.successor import PairTable, SuccessorProposer
from tests.proposers.helpers import TinyRuntime, make_inputs, make_stream

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def tokens(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def drafted(
    proposer: SuccessorProposer,
    history: str,
    *,
    k: int = 6,
    request_id: str = "a",
    salt: str | None = None,
) -> str:
    inputs = make_inputs({request_id: tokens(history)}, k=k)
    draft = proposer.propose(replace(inputs, cache_salts=[salt]))
    return "".join(LETTERS[token] for token in draft.token_ids[0, : draft.num_draft_tokens[0]])


def serve(
    proposer: SuccessorProposer, prompt: str, *blocks: str, request_id: str, salt: str | None = None
) -> None:
    """A whole life: drafts, blocks of output, the end."""
    history = prompt
    for block in blocks:
        drafted(proposer, history, request_id=request_id, salt=salt)
        proposer.on_commit(
            Commit(request_ids=[request_id], token_ids=[tokens(block)], num_accepted=[0])
        )
        history += block
    proposer.forget([request_id])


@pytest.mark.parametrize(
    ("history", "draft"),
    [
        ("abcdeab", "cdeabc"),  # on into what has just been drafted
        ("abcxabdab", "dabdab"),  # what came last, not what came first
        ("abcxbcyab", "cyabcy"),  # from pair to pair: ab c, then bc y, which c came before
        ("aaa", "aaaaaa"),
        ("abcde", ""),
        ("ab", ""),
        ("a", ""),
    ],
)
def test_table(history: str, draft: str) -> None:
    """Guards against another successor, another pair or another end of the row."""
    assert drafted(SuccessorProposer(max_length=6), history) == draft
    assert drafted(SuccessorProposer(max_length=6), history, k=2) == draft[:2]
    assert drafted(SuccessorProposer(), history) == draft[:3]


def test_history_is_learnt_as_it_grows() -> None:
    """Guards the seam between what is known and what is new, wherever it lies."""
    stream = "".join(LETTERS[token % 5] for token in make_stream(1, 60))
    proposer = SuccessorProposer()
    end = 1
    for step in (1, 1, 2, 3, 1, 5, 1, 1, 8, 2, 13):
        assert drafted(proposer, stream[:end]) == drafted(SuccessorProposer(), stream[:end])
        end += step


def test_outputs_of_requests_that_are_gone_are_learnt() -> None:
    """Guards against a shared table that nothing enters, or that overrules the own one."""
    proposer = SuccessorProposer()
    serve(proposer, "xy", "ab", "cd", "e", request_id="one")
    assert drafted(proposer, "zab", request_id="two") == "cde"
    assert drafted(proposer, "abqab", request_id="three") == "qab", "its own text first"
    assert drafted(proposer, "bcqbc", request_id="four") == "qbc"
    assert drafted(proposer, "zxy", request_id="five") == "", "prompts teach nobody"
    assert drafted(SuccessorProposer(), "zab") == ""


def test_running_requests_teach_nobody() -> None:
    """Guards drafts that depend on batch mates: a row is learnt when its request is gone."""
    proposer = SuccessorProposer()
    drafted(proposer, "xy", request_id="one")
    proposer.on_commit(Commit(request_ids=["one"], token_ids=[tokens("abcd")], num_accepted=[0]))
    assert drafted(proposer, "zab", request_id="two") == ""
    proposer.forget(["one"])
    assert drafted(proposer, "zab", request_id="two") == "cd"


def test_a_request_with_a_salt_neither_learns_nor_teaches() -> None:
    """Guards against the time of an answer telling of another's, who has not agreed to share."""
    proposer = SuccessorProposer()
    serve(proposer, "xy", "abcd", request_id="one", salt="secret")
    assert drafted(proposer, "zab", request_id="two") == ""
    assert drafted(proposer, "zab", request_id="three", salt="secret") == ""
    serve(proposer, "xy", "abcd", request_id="four")
    assert drafted(proposer, "zab", request_id="five", salt="secret") == ""
    assert drafted(proposer, "abcab", request_id="six", salt="secret") == "cab", "its own text"
    assert drafted(proposer, "zab", request_id="seven") == "cd"


def test_the_shared_table_is_bounded_and_drops_what_is_oldest() -> None:
    """Guards memory of a server that never stops."""
    table = PairTable(3)
    table.learn(tokens("abcde"))
    assert table.get(*tokens("ab")) == tokens("c")[0]
    table.learn(tokens("abf"))  # said anew, it is the newest
    table.learn(tokens("xyz"))
    found = {pair: table.get(*tokens(pair)) for pair in ("ab", "bc", "cd", "xy")}
    assert found == {"ab": 5, "bc": None, "cd": 4, "xy": 25}
    proposer = SuccessorProposer(shared_pairs=0)
    serve(proposer, "xy", "abcd", request_id="one")
    assert drafted(proposer, "zab", request_id="two") == ""


def test_learning_is_linear() -> None:
    """Guards a step that costs more the longer a request has run: each token is written once."""
    writes = 0

    class Counted(PairTable):
        def learn(self, text: list[int]) -> None:  # type: ignore[override]
            nonlocal writes
            writes += len(text)
            super().learn(text)

    proposer, stream = SuccessorProposer(), make_stream(2, 400)
    proposer.propose(make_inputs({"a": stream[:1]}, k=3))
    proposer._requests["a"].pairs = Counted()
    for end in range(2, 400):
        proposer.propose(make_inputs({"a": stream[:end]}, k=3))
    assert writes <= 3 * 400


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 0}, "max_length=0: expected an integer from 1 to 64"),
        ({"shared_pairs": -1}, "shared_pairs=-1"),
        ({"shared_pairs": True}, "shared_pairs=True"),
        ({"pairs": 3}, "no option 'pairs'; its options are: max_length, shared_pairs"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    """Guards against options that are clamped, or ignored, in silence (case 41)."""
    with pytest.raises(ValueError, match=message):
        registry.create("successor", options, TinyRuntime())
