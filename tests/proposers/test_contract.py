"""What every registered proposer of the host must keep, whatever it drafts: over the registry.

Those that carry a model need an engine; see tests/parity.
"""

import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from proposers import Commit, Proposer, ProposerInfo, registry
from tests.proposers.helpers import (
    VOCAB_SIZE,
    TinyRuntime,
    install_entry_point,
    make_inputs,
    make_stream,
)

STREAMS = {f"r{index}": make_stream(index) for index in range(16)}
NAMES = [
    *(
        info.name
        for info in registry.infos(testing=True)
        if info.status in ("built", "testing") and info.kind == "host"
    ),
    "repeat-last",
]
Make = Callable[[], Proposer]


@pytest.fixture(params=NAMES)
def info(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> ProposerInfo:
    target = "tests.third_party.repeat_last:SPEC"
    install_entry_point(monkeypatch, tmp_path, "repeat-last", target)
    return next(info for info in registry.infos(testing=True) if info.name == request.param)


@pytest.fixture
def make(info: ProposerInfo) -> Make:
    """Builds a new instance through the registry; one that takes a recording gets the streams."""
    recorded = any(option.name == "records" for option in info.options)
    options = {"records": STREAMS} if recorded else {}
    return lambda: registry.create(info.name, options, TinyRuntime())


def histories(num_tokens: int, ids: list[str] | None = None) -> dict[str, list[int]]:
    return {name: STREAMS[name][:num_tokens] for name in ids or STREAMS}


def rows(proposer: Proposer, tokens: dict[str, list[int]], k: int = 6) -> dict[str, list[int]]:
    """The drafts of each request by id, validated."""
    inputs = make_inputs(tokens, k=k)
    draft = proposer.propose(inputs)
    draft.validate(inputs, VOCAB_SIZE)
    lengths = draft.num_draft_tokens.tolist()
    return {
        name: draft.token_ids[row, : lengths[row]].tolist()
        for row, name in enumerate(inputs.request_ids)
    }


def test_flags_equal_the_declared_ones(info: ProposerInfo, make: Make) -> None:
    """Guards against a support matrix that says what the code does not do."""
    proposer = make()
    assert isinstance(proposer, Proposer)
    assert proposer.name == info.name
    assert proposer.graph_safe is info.graph_safe
    assert proposer.needs_hidden_states is info.needs_hidden_states
    assert proposer.produces_probs is info.produces_probs


def test_capture_of_a_host_side_proposer_is_refused(info: ProposerInfo, make: Make) -> None:
    """Guards against a host-side proposer that is silently treated as captured."""
    with pytest.raises(RuntimeError, match=f"{info.name}.*graph_safe=False"):
        make().capture(object())


def test_unknown_option_is_refused(info: ProposerInfo, make: Make) -> None:
    """Guards against a misspelt option that is silently ignored (case 41)."""
    with pytest.raises(ValueError, match="no option 'ngram_sizes'; its options are: "):
        registry.create(info.name, {"ngram_sizes": 3}, TinyRuntime())


@pytest.mark.parametrize("k", [0, 1, 2, 6, 9])
def test_draft_is_well_formed_in_a_full_batch(make: Make, k: int) -> None:
    """Guards against wrong widths, ids out of range and tails that are not -1."""
    proposer = make()
    for num_tokens in (1, 2, 30, 99, 100):
        rows(proposer, histories(num_tokens), k)


def test_empty_batch(make: Make) -> None:
    """Guards against code that assumes a first row."""
    assert rows(make(), {}) == {}


def test_allowances_are_obeyed_row_by_row(make: Make) -> None:
    """Guards against drafts beyond max_tokens, the context limit or the KV pool (cases 26, 27)."""
    proposer = make()
    for turn in range(7):
        allowances = [(row + turn) % 7 for row in range(16)]
        inputs = make_inputs(histories(40 + turn), k=6, allowances=allowances)
        draft = proposer.propose(inputs)
        draft.validate(inputs, VOCAB_SIZE)
        assert (draft.num_draft_tokens <= np.array(allowances)).all()
        assert not draft.num_draft_tokens[np.array(allowances) == 0].any()


def test_inputs_are_not_changed(make: Make) -> None:
    """Guards against a proposer that writes into the engine's state."""
    inputs = make_inputs(histories(50), k=6)
    before = [tokens.copy() for tokens in inputs.token_ids]
    allowances = inputs.num_draft_tokens.copy()
    make().propose(inputs)
    for tokens, copy in zip(inputs.token_ids, before, strict=True):
        assert np.array_equal(tokens, copy)
    assert np.array_equal(inputs.num_draft_tokens, allowances)


def test_draft_is_not_a_buffer_that_the_next_call_overwrites(make: Make) -> None:
    """Guards against a stale draft changing under an engine that still holds it (case 23)."""
    proposer = make()
    draft = proposer.propose(make_inputs(histories(50), k=6))
    copy = draft.token_ids.copy()
    proposer.propose(make_inputs(histories(61), k=6))
    assert np.array_equal(draft.token_ids, copy)


def test_two_instances_agree(make: Make) -> None:
    """Guards against drafts from hidden randomness: a rejection-mode replay needs the same ones."""
    first, second = make(), make()
    for num_tokens in (10, 14, 15, 40):
        assert rows(first, histories(num_tokens)) == rows(second, histories(num_tokens))


def test_batch_mates_order_and_pauses_change_nothing(make: Make) -> None:
    """Guards against state kept by row, or lost in a phase without drafts (case 37)."""
    shuffle = random.Random(0)
    batched, single, progress = make(), make(), dict.fromkeys(STREAMS, 5)
    for _ in range(30):
        ids = shuffle.sample(sorted(STREAMS), shuffle.randint(1, 16))
        allowances = [0 if shuffle.random() < 0.2 else 6 for _ in ids]
        tokens = {name: STREAMS[name][: progress[name]] for name in ids}
        inputs = make_inputs(tokens, k=6, allowances=allowances)
        draft = batched.propose(inputs)
        draft.validate(inputs, VOCAB_SIZE)
        for row, name in enumerate(ids):
            if allowances[row]:
                single.forget([name])
                alone = rows(single, {name: tokens[name]})[name]
                assert draft.token_ids[row, : draft.num_draft_tokens[row]].tolist() == alone
            progress[name] = min(99, progress[name] + shuffle.randint(1, 7))


def test_resumed_or_rolled_back_request_drafts_as_a_new_one(make: Make) -> None:
    """Guards against drafts from tokens that are gone: preemption, stop strings (case 23)."""
    proposer = make()
    rows(proposer, histories(80))
    rolled_back = rows(proposer, histories(60))
    assert rolled_back == rows(make(), histories(60))
    proposer.forget(list(STREAMS))
    assert rows(proposer, histories(80)) == rows(make(), histories(80))


def test_commits_may_come_or_not(make: Make) -> None:
    """Guards against a host-side proposer whose drafts depend on notices that it can do without."""
    told, untold = make(), make()
    for start in range(20, 60, 4):
        new = {name: stream[start : start + 4] for name, stream in STREAMS.items()}
        told.on_commit(
            Commit(request_ids=list(new), token_ids=list(new.values()), num_accepted=[3] * 16)
        )
        assert rows(told, histories(start + 4)) == rows(untold, histories(start + 4))


def test_forget_frees_and_ignores_unknown_ids(make: Make) -> None:
    """Guards against records of finished requests that pile up (case 45)."""
    proposer = make()
    tokens = histories(99)
    for _ in range(3):  # the first use of a code path allocates for good
        rows(proposer, tokens)
        proposer.forget(list(tokens))
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(6):
            rows(proposer, tokens)
            proposer.forget([*tokens, "never seen"])
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 8_000, f"{grown} bytes kept after forget"
