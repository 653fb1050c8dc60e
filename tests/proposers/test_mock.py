"""The scripted proposers do what they say: tests of verification lean on them."""

import pytest

from proposers import Commit, registry
from proposers.mock import (
    AcceptExactly,
    EmptyProposer,
    JunkProposer,
    MockProposer,
    OracleProposer,
    RaggedProposer,
)
from tests.proposers.helpers import VOCAB_SIZE, TinyRuntime, make_inputs, make_stream

STREAM = make_stream(3, 40)
PROMPT, OUTPUT = tuple(STREAM[:10]), STREAM[10:]
BY_ID = {"a": STREAM}
BY_PROMPT = {PROMPT: OUTPUT}


def drafts(proposer: MockProposer, num_tokens: int, k: int = 6, name: str = "a") -> list[int]:
    draft = proposer.propose(make_inputs({name: STREAM[:num_tokens]}, k=k))
    return draft.token_ids[0, : draft.num_draft_tokens[0]].tolist()


def num_accepted(proposed: list[int], num_tokens: int) -> int:
    """What greedy verification would accept after num_tokens tokens of the stream."""
    accepted = 0
    while accepted < len(proposed) and proposed[accepted] == STREAM[num_tokens + accepted]:
        accepted += 1
    return accepted


@pytest.mark.parametrize("records", [BY_ID, BY_PROMPT])
@pytest.mark.parametrize("num_tokens", [10, 11, 33])
def test_oracle_is_accepted_at_every_position(records: dict, num_tokens: int) -> None:
    """Guards against a recording that is read with an offset."""
    oracle = OracleProposer(vocab_size=VOCAB_SIZE, records=records)
    assert drafts(oracle, num_tokens) == STREAM[num_tokens : num_tokens + 6]


def test_oracle_drafts_less_at_the_end_of_the_recording() -> None:
    """Guards against drafts invented after the recorded run stopped."""
    oracle = OracleProposer(vocab_size=VOCAB_SIZE, records=BY_ID)
    assert drafts(oracle, 38) == STREAM[38:]
    assert drafts(oracle, 40) == []


def test_recording_is_found_by_the_longest_prompt() -> None:
    """Guards against one prompt that begins another taking its place."""
    records = {PROMPT[:4]: [0, 0, 0, 0, 0, 0, 0, 0], PROMPT: OUTPUT}
    assert drafts(OracleProposer(vocab_size=VOCAB_SIZE, records=records), 12) == STREAM[12:18]


def test_oracle_without_a_recording_says_so() -> None:
    """Guards against a test that believes in full acceptance while nothing was drafted."""
    with pytest.raises(ValueError, match="no recording of request 'b'"):
        drafts(OracleProposer(vocab_size=VOCAB_SIZE, records=BY_ID), 12, name="b")


def test_history_that_left_the_recording_is_an_error() -> None:
    """Guards against a lost token that only shows as lower acceptance."""
    oracle = OracleProposer(vocab_size=VOCAB_SIZE, records=BY_ID)
    wrong = [*STREAM[:12], (STREAM[12] + 1) % VOCAB_SIZE]
    with pytest.raises(AssertionError, match="'a' left its recording at position 12"):
        oracle.propose(make_inputs({"a": wrong}, k=3))


@pytest.mark.parametrize("num_tokens", range(10, 34))
def test_junk_is_never_accepted_and_always_valid(num_tokens: int) -> None:
    """Guards against junk that is right by luck: then the counts of a test are wrong."""
    proposed = drafts(JunkProposer(vocab_size=VOCAB_SIZE, records=BY_ID), num_tokens)
    assert len(proposed) == 6
    for offset, token in enumerate(proposed):
        assert token != STREAM[num_tokens + offset]
        assert 0 <= token < VOCAB_SIZE


def test_junk_without_a_recording_repeats_one_token() -> None:
    """Guards against a junk proposer that needs a recording to be of use."""
    assert drafts(JunkProposer(vocab_size=VOCAB_SIZE), 12, k=2) == [VOCAB_SIZE - 1] * 2
    assert drafts(JunkProposer(vocab_size=VOCAB_SIZE, token_id=7), 12, k=2) == [7, 7]


@pytest.mark.parametrize("wanted", range(8))
def test_accept_exactly(wanted: int) -> None:
    """Guards against an off-by-one between "j accepted" and "junk at j"."""
    proposer = AcceptExactly(wanted, vocab_size=VOCAB_SIZE, records=BY_PROMPT)
    proposed = drafts(proposer, 15)
    assert len(proposed) == 6
    assert num_accepted(proposed, 15) == min(wanted, 6)


def test_ragged_covers_lengths_and_acceptances() -> None:
    """Guards against a ragged schedule that never tries an empty, a full or a half-right draft."""
    proposer = RaggedProposer(vocab_size=VOCAB_SIZE, records=BY_ID, seed=1)
    seen = set()
    for name in ("a", *"bcdefgh"):
        proposer.streams = OracleProposer(vocab_size=VOCAB_SIZE, records={name: STREAM}).streams
        for num_tokens in range(10, 34):
            proposed = drafts(proposer, num_tokens, name=name)
            seen.add((len(proposed), num_accepted(proposed, num_tokens)))
    assert {length for length, _ in seen} == set(range(7))
    assert {(3, 0), (3, 3), (6, 6)} <= seen
    assert any(0 < accepted < length for length, accepted in seen)


def test_ragged_schedule_follows_its_seed() -> None:
    """Guards against a schedule that cannot be repeated, or that ignores the seed."""
    schedules = [
        [
            drafts(RaggedProposer(vocab_size=VOCAB_SIZE, records=BY_ID, seed=seed), n)
            for n in range(10, 34)
        ]
        for seed in (0, 0, 1)
    ]
    assert schedules[0] == schedules[1] != schedules[2]


def test_empty_never_drafts() -> None:
    """Guards against an "off" column that has drafts in it."""
    assert drafts(EmptyProposer(vocab_size=VOCAB_SIZE), 20) == []


def test_scripts_count_what_they_did_and_were_told() -> None:
    """Guards against counters that a metrics test (case 47) compares with the engine's."""
    oracle = OracleProposer(vocab_size=VOCAB_SIZE, records=BY_ID)
    drafts(oracle, 20)
    drafts(oracle, 38)
    commit = Commit(request_ids=["a"], token_ids=[STREAM[20:27]], num_accepted=[6])
    oracle.on_commit(commit)
    oracle.forget(["a"])
    assert (oracle.num_proposals, oracle.num_proposed_tokens) == (2, 8)
    assert oracle.commits == [commit]
    assert oracle.forgotten == ["a"]


def test_options_reach_the_scripts() -> None:
    """Guards against options that the registry accepts and drops."""

    def built(name: str, **options: object) -> MockProposer:
        proposer = registry.create(name, {"records": BY_ID, **options}, TinyRuntime())
        assert isinstance(proposer, MockProposer)
        return proposer

    assert num_accepted(drafts(built("mock-accept-exactly", num_accepted=2), 15), 15) == 2
    ragged = built("mock-ragged", seed=5, true_fraction=0.0)
    assert all(num_accepted(drafts(ragged, n), n) == 0 for n in range(10, 34))
    assert drafts(built("mock-oracle"), 15) == STREAM[15:21]
    unrecorded = registry.create("mock-junk", {"token_id": 5}, TinyRuntime())
    assert isinstance(unrecorded, JunkProposer)
    assert drafts(unrecorded, 15) == [5] * 6


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mock-oracle", {"records": [1, 2]}, r"records=\[1, 2\]: expected"),
        ("mock-oracle", {"records": {3: [1]}}, r"records=\{3: \[1\]\}: expected"),
        ("mock-junk", {"token_id": VOCAB_SIZE}, "token_id=48: .* from 0 to 47"),
        ("mock-accept-exactly", {"num_accepted": 7}, "num_accepted=7: .* from 0 to 6"),
        ("mock-ragged", {"true_fraction": 1.5}, "true_fraction=1.5: .* from 0 to 1"),
        ("mock-ragged", {"seed": 1.9}, "seed=1.9: .* an integer"),
        ("mock-empty", {"records": {}}, "no option 'records'; its options are: none"),
    ],
)
def test_bad_options_are_refused(name: str, options: dict[str, object], message: str) -> None:
    """Guards against a test set-up that silently runs something else."""
    with pytest.raises(ValueError, match=message):
        registry.create(name, options, TinyRuntime())
