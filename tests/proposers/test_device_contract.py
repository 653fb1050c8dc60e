"""What every registered proposer that carries a model must keep: over the registry, in an engine.

Whatever it drafts: drafts are well formed, are a function of the request alone, and do not depend
on how the rows that they are made of came to be. `device_cases.py` says how each is started.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from graphengine.engine import Engine
from graphengine.sampling.params import SamplingParams
from graphengine.speculative_config import SpeculativeConfig
from proposers import Draft, ProposeInputs, ProposerInfo, registry
from proposers.base import CacheRows
from proposers.chain import TIER
from proposers.device import ModelProposer
from proposers.model_based import ModelBasedProposer
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Setup
from tests.proposers.device_cases import CASES
from tests.proposers.held import held
from tests.tiny import VOCAB_SIZE

SETUP = Setup(k=3, max_num_seqs=5, num_reqs=(1, 2, 4))
NUM_BLOCKS = SETUP.max_model_len // SETUP.block_size  # of a full table
PROMPTS = {f"r{n}": [7 + n] * (3 * n + 1) for n in range(6)}
NAMES = [*PROMPTS, *(f"{name}-again" for name in PROMPTS)]
PARAMS = SamplingParams(max_tokens=22, ignore_eos=True)
INFOS = [
    info
    for info in registry.infos(testing=True)
    if info.kind == "device" and info.status in ("built", "testing")
]
Texts = dict[str, list[int]]
TextsOf = Callable[[str], Texts]
Start = Callable[..., Engine]


@pytest.fixture(scope="module")
def texts_of(checkpoints: Checkpoints) -> TextsOf:
    """What the target of a proposer makes of PROMPTS when nobody drafts, prompts included."""

    @cache
    def texts(target: str) -> Texts:
        harness = Harness(Setup().start(target))  # type: ignore[arg-type]
        for name, prompt in PROMPTS.items():
            harness.add(name, prompt, PARAMS)
        harness.drain()
        harness.engine.close()
        return {name: prompt + harness.stream(name) for name, prompt in PROMPTS.items()}

    return lambda name: texts(str(CASES[name].target(checkpoints)))


@pytest.fixture(scope="module")
def start(checkpoints: Checkpoints, texts_of: TextsOf) -> Start:
    def call(name: str, setup: Setup = SETUP, **options: Any) -> Engine:
        case = CASES[name]
        texts = texts_of(name)
        given = case.options(checkpoints, {one: texts[one[:2]] for one in NAMES})
        given = {**given, "self_check": "off", **options}
        return setup.start(case.target(checkpoints), method=name, **given)

    return call


@pytest.fixture(scope="module", params=INFOS, ids=lambda info: info.name)
def info(request: pytest.FixtureRequest) -> ProposerInfo:
    found: ProposerInfo = request.param
    return found


@pytest.fixture(scope="module")
def engine(info: ProposerInfo, start: Start) -> Iterator[Engine]:
    """One for all tests that ask a proposer directly."""
    engine = start(info.name)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def texts(info: ProposerInfo, texts_of: TextsOf) -> Texts:
    return texts_of(info.name)


def make_inputs(known: Texts, k: int, allowances: Sequence[int] | None = None) -> ProposeInputs:
    """Inputs of requests without draft KV, each with the blocks that its name says."""
    arrays = [np.array(tokens, dtype=np.int32) for tokens in known.values()]
    counts = np.array([k] * len(arrays) if allowances is None else allowances, dtype=np.int32)
    first = np.array([int(name[1:]) * NUM_BLOCKS + 1 for name in known], dtype=np.int32)
    table = first[:, None] + np.arange(NUM_BLOCKS, dtype=np.int32)
    cached = np.zeros(len(arrays), dtype=np.int32)
    for array in (*arrays, counts, table, cached):
        array.flags.writeable = False
    return ProposeInputs(
        request_ids=list(known),
        token_ids=arrays,
        num_draft_tokens=counts,
        k=k,
        cache=CacheRows(block_table=table, draft_kv_lens=cached),
    )


def proposer_of(engine: Engine) -> ModelProposer:
    assert isinstance(engine.proposer, ModelProposer)
    return engine.proposer


def drafts(engine: Engine, inputs: ProposeInputs) -> dict[str, list[int]]:
    """Drafts by request, validated."""
    draft = proposer_of(engine).propose(held(engine, inputs))
    draft.validate(inputs, VOCAB_SIZE)
    return by_request(inputs, draft)


def by_request(inputs: ProposeInputs, draft: Draft) -> dict[str, list[int]]:
    rows = zip(inputs.request_ids, draft.token_ids, draft.num_draft_tokens, strict=True)
    return {name: ids[:count].tolist() for name, ids, count in rows}


def some(texts: Texts, num_reqs: int, cut: int = 0) -> Texts:
    """Histories of several requests, each so many tokens shorter than its text but one."""
    names = list(texts)[:num_reqs]
    return {name: texts[name][: max(1, len(texts[name]) - 5 - cut)] for name in names}


def test_every_device_proposer_has_a_case_and_a_stand_in() -> None:
    """Guards against a proposer that is registered and runs in none of these tests."""
    assert {info.name for info in INFOS} == set(CASES)
    built = [info.name for info in INFOS if info.status == "built"]
    assert all(CASES[name].mock in CASES for name in built)


def test_flags_equal_the_declared_ones(info: ProposerInfo, engine: Engine) -> None:
    """Guards against a support matrix that says what the code does not do."""
    proposer = proposer_of(engine)
    for flag in ("name", "graph_safe", "needs_hidden_states", "produces_probs"):
        assert getattr(proposer, flag) == getattr(info, flag)
    assert info.graph_safe
    assert info.model != "none", "a self-check that nobody can turn off"
    assert proposer.suspects
    plan = engine.resolved.draft
    assert plan is not None
    assert bool(plan.taps) == info.needs_hidden_states


def test_unknown_option_is_refused(info: ProposerInfo) -> None:
    """Guards against a misspelt option that is silently ignored (case 41)."""
    with pytest.raises(ValueError, match="no option 'layerz'; its options are: "):
        SpeculativeConfig(info.name, model="x", layerz=3)


def test_drafts_are_well_formed_and_within_their_allowance(engine: Engine, texts: Texts) -> None:
    """Guards against drafts beyond max_tokens, context limit or pool, and against bad tails."""
    for turn, num_reqs in enumerate((5, 3, 1, 4, 2)):
        for k in engine.resolved.table.draft_lengths[1:]:
            allowances = [(row + turn) % (k + 1) for row in range(num_reqs)]
            inputs = make_inputs(some(texts, num_reqs, turn), k, allowances)
            found = drafts(engine, inputs)
            assert [len(row) for row in found.values()] == allowances


def test_batch_mates_order_and_length_change_nothing(engine: Engine, texts: Texts) -> None:
    """Guards against drafts that depend on the row, the cell or the others in it."""
    known = some(texts, 5)
    together = drafts(engine, make_inputs(known, 3))
    names = list(known)[::-1]
    assert drafts(engine, make_inputs({name: known[name] for name in names}, 3)) == together
    for name, tokens in known.items():
        for k in engine.resolved.table.draft_lengths[1:]:
            assert drafts(engine, make_inputs({name: tokens}, k))[name] == together[name][:k]


def test_inputs_and_earlier_drafts_are_not_changed(engine: Engine, texts: Texts) -> None:
    """Guards the engine's state, and a draft that it still holds when the next is made."""
    inputs = make_inputs(some(texts, 5), 3)
    before = [tokens.copy() for tokens in inputs.token_ids]
    draft = proposer_of(engine).propose(held(engine, inputs))
    assert all(map(np.array_equal, inputs.token_ids, before))
    assert draft.draft_kv_lens is not None
    parts = (draft.token_ids, draft.num_draft_tokens, draft.draft_kv_lens)
    copies = [part.copy() for part in parts]
    proposer_of(engine).propose(held(engine, make_inputs(some(texts, 5, 2), 2)))
    assert all(map(np.array_equal, parts, copies))


def test_forgotten_and_unknown_requests(engine: Engine, texts: Texts) -> None:
    """Guards against a request that comes back and finds something of its first life."""
    inputs = make_inputs(some(texts, 5), 3)
    first = drafts(engine, inputs)
    proposer_of(engine).forget([*inputs.request_ids, "never seen"])
    assert drafts(engine, inputs) == first


def test_two_engines_agree(info: ProposerInfo, engine: Engine, start: Start, texts: Texts) -> None:
    """Guards against drafts from hidden randomness: a rejection-mode replay needs the same ones."""
    other = start(info.name)
    inputs = make_inputs(some(texts, 5), 3)
    assert drafts(engine, inputs) == drafts(other, inputs)
    other.close()


def test_first_drafts_are_of_the_text(engine: Engine, texts: Texts) -> None:
    """Guards the self-check, which compares them place by place."""
    tokens = np.array(texts["r5"], dtype=np.int32)
    table = np.arange(1, NUM_BLOCKS + 1, dtype=np.int32)
    found = proposer_of(engine).first_drafts(tokens, table)
    assert (found.shape, found.dtype) == (tokens.shape, np.int32)
    assert ((found >= -1) & (found < VOCAB_SIZE)).all()


def test_a_draft_is_one_replay(info: ProposerInfo, start: Start) -> None:
    """Guards against chains in pieces; more runs only where a prompt or a gap is filled."""
    harness = Harness(start(info.name))
    for name in ("r1", "r2"):
        harness.add(name, PROMPTS[name], PARAMS)
    harness.step()
    before = harness.engine.stats()
    for turn in range(1, 5):
        harness.step()
        stats = harness.engine.stats()
        replays = {key: n - before.replays.get(key, 0) for key, n in stats.replays.items()}
        assert sum(n for key, n in replays.items() if key.endswith(f":{TIER}")) == turn
        assert stats.eager_fallbacks == before.eager_fallbacks
        assert stats.compile_events_after_warmup == 0
    harness.engine.close()


Drafts = list[tuple[str, int, list[int]]]


def run(engine: Engine, names: Sequence[str], limits: Sequence[int]) -> tuple[Harness, Drafts]:
    """Serve requests with a draft limit that changes from step to step.

    Returns:
        The harness, and of every draft its request, the length of the history and the tokens.
    """
    harness, proposer, found = Harness(engine), proposer_of(engine), []
    propose = proposer.propose

    def spy(inputs: ProposeInputs) -> Draft:
        draft = propose(inputs)
        rows = by_request(inputs, draft).items()
        for (name, row), tokens in zip(rows, inputs.token_ids, strict=True):
            found.append((name, len(tokens), row))
        return draft

    proposer.propose = spy  # type: ignore[method-assign]
    for first in range(0, len(names), len(PROMPTS)):  # a prompt that comes back is cached
        for name in names[first : first + len(PROMPTS)]:
            harness.add(name, PROMPTS[name[:2]], PARAMS)
        while engine.has_unfinished_requests():
            engine.draft_limit = limits[harness.num_steps % len(limits)]
            harness.step()
    harness.drain()
    return harness, found


def test_drafts_do_not_depend_on_how_their_rows_came(
    info: ProposerInfo, start: Start, texts: Texts
) -> None:
    """Guards chunks, prefix hits, preemption and pauses, each of which leaves rows to catch up."""
    easy, expected = run(start(info.name, Setup(k=3, max_num_seqs=6, prefix=False)), NAMES[:6], [3])
    setup = Setup(k=3, max_num_seqs=5, num_reqs=(1, 2, 4), num_blocks=26, budget=13)
    hard, found = run(start(info.name, setup), NAMES, [3, 3, 0, 0, 0, 3, 3, 1, 2])
    stats = hard.engine.stats()
    assert stats.num_preemptions > 0
    assert max(one.metrics.num_cached_tokens for one in hard.requests.values()) > 0
    known, num_compared = {(name, length): row for name, length, row in expected}, 0
    for name, length, row in found:
        wanted = known.get((name[:2], length), [])
        size = min(len(row), len(wanted))
        assert row[:size] == wanted[:size], f"other drafts of {name} behind {length} tokens"
        num_compared += size
    assert num_compared > 30
    for harness, names in ((easy, NAMES[:6]), (hard, NAMES)):
        for name in names:
            assert PROMPTS[name[:2]] + harness.stream(name) == texts[name[:2]]
        harness.engine.close()


@pytest.mark.parametrize("name", [info.name for info in INFOS if info.status == "built"])
def test_a_stand_in_has_the_contract_of_its_original(name: str, start: Start) -> None:
    """Guards tests that pass by a stand-in and would not by the proposer that it stands for."""
    engines = [start(one) for one in (name, CASES[name].mock)]
    real, mock = (engine.proposer for engine in engines)
    infos = [registry.find(engine.proposer.name).info for engine in engines]
    for flag in ("kind", "graph_safe", "needs_hidden_states", "produces_probs", "longest_match"):
        assert getattr(infos[0], flag) == getattr(infos[1], flag), flag
    plans = [engine.resolved.draft for engine in engines]
    assert plans[0].lookahead == plans[1].lookahead
    assert bool(plans[0].taps) == bool(plans[1].taps)
    contract = {*dir(ModelProposer), *dir(ModelBasedProposer)}
    for method in (name for name in contract if not name.startswith("_")):
        pair = [getattr(type(one), method) for one in (real, mock)]
        if inspect.isfunction(pair[0]):
            assert inspect.signature(pair[0]) == inspect.signature(pair[1]), method
    for k in range(1, 5):
        assert mock.width(k) == real.width(k)
        for count in range(k + 1):
            assert mock.num_kept_drafts(count, k) == real.num_kept_drafts(count, k)
            assert mock.num_loop_rows(count, k) == real.num_loop_rows(count, k)
    for engine in engines:
        engine.close()
