"""Drafts of mtp are a function of the history: chunks, cached prefixes, pauses, preemption and the
draft length change none of them. Also: which rows are run, and layers that are always right.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphengine.sampling.params import SamplingParams
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Setup
from tests.mtp_checkpoints import MtpCheckpoint, make_mtp
from tests.parity.mtp_runs import (
    MAX_TOKENS,
    PROMPT,
    MakeMtp,
    Plain,
    Recorder,
    Tokens,
    cached_maker,
    make_perfect,
    plain,
    record,
)
from tests.parity.test_self_draft import check_all_accepted, random_jobs

pytestmark = pytest.mark.parity

PROMPTS: tuple[Tokens, ...] = (PROMPT, (7,), (9, 9), tuple(range(50, 80)), (3, 4, 5, 6, 90, 91))
ACCEPT = (0, 3, 1, 5, 2, 4)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MakeMtp:
    return cached_maker(tmp_path_factory.mktemp("mtp"), make_mtp)


@pytest.fixture(scope="module", params=[1, 2, 3])
def checkpoint(request: pytest.FixtureRequest, made: MakeMtp) -> MtpCheckpoint:
    return made("mimo" if request.param == 1 else "mimo_v2", num_layers=request.param)


@pytest.fixture(scope="module")
def expected(checkpoint: MtpCheckpoint) -> Plain:
    return plain(checkpoint, PROMPTS, Setup(k=5))


def run(checkpoint: MtpCheckpoint, expected: Plain, setup: Setup, **options: Any) -> Recorder:
    """A recorder whose steps have some of their drafts accepted."""
    return record(checkpoint, setup, truth=expected.streams, accept=ACCEPT, options=options)


def finish(recorder: Recorder, expected: Plain, least: int) -> None:
    """Every draft is the plain one, and some were accepted: the windows were of every width."""
    expected.check(recorder, least)
    stats = recorder.harness.engine.stats()
    assert stats.num_accepted_tokens > 0
    assert stats.compile_events_after_warmup == 0
    recorder.harness.engine.close()


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_drafts_do_not_depend_on_k(k: int, checkpoint: MtpCheckpoint, expected: Plain) -> None:
    """Guards the width of the window, and layers behind the last draft."""
    recorder = run(checkpoint, expected, Setup(k=k, debug=True))
    assert recorder.serve(PROMPTS) == [expected.streams[prompt] for prompt in PROMPTS]
    assert len(recorder.proposer.runtime.kv_caches) == min(k, len(checkpoint.layers))
    finish(recorder, expected, 15)


@pytest.mark.parametrize("budget", [4, 5, 13])
def test_drafts_do_not_depend_on_chunks(
    budget: int, checkpoint: MtpCheckpoint, expected: Plain
) -> None:
    """Guards case 32: the last slots of a chunk, whose deeper tokens are in the next one."""
    recorder = run(checkpoint, expected, Setup(k=3, budget=budget))
    recorder.serve(PROMPTS)
    finish(recorder, expected, 15)


def test_drafts_do_not_depend_on_cached_prefixes(checkpoint: MtpCheckpoint) -> None:
    """Guards a shared block whose last slots were made with the tokens of who came first.

    Prompts part within, at and up to three tokens behind the edge of a block.
    """
    stem = tuple(range(100, 112))
    prompts = [stem, *((*stem[:end], 200 + end, 7, 8) for end in range(7, 12))]
    expected = plain(checkpoint, prompts, Setup(k=3))
    recorder = run(checkpoint, expected, Setup(k=3))
    for turn in range(2):
        for index, prompt in enumerate(prompts):
            recorder.serve([prompt], name=f"{turn}-{index}-")
    # Behind its own answer, too.
    longer = expected.streams[stem]
    more = plain(checkpoint, [longer], Setup(k=3))
    recorder.serve([longer], name="longer")
    hits = [request.metrics.num_cached_tokens for request in recorder.harness.requests.values()]
    assert sum(hit > 0 for hit in hits) >= len(prompts)
    finish(recorder, Plain(expected.streams, expected.drafts | more.drafts), 40)


@pytest.mark.parametrize("schedule", [(3, 3, 0, 0, 0, 3, 3), (3, *[0] * 9, 3, 1, 3, 0, 2)])
def test_drafts_do_not_depend_on_pauses(
    schedule: tuple[int, ...], checkpoint: MtpCheckpoint, expected: Plain
) -> None:
    """Guards case 37: gaps of the draft KV, short and long, are filled for every layer."""
    recorder = run(checkpoint, expected, Setup(k=3))
    for index, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
        recorder.harness.add(str(index), prompt, params)
    turn = 0
    while recorder.harness.engine.has_unfinished_requests():
        recorder.harness.engine.draft_limit = schedule[turn % len(schedule)]
        recorder.harness.step()
        turn += 1
    finish(recorder, expected, 8)


def test_drafts_do_not_depend_on_preemption(checkpoint: MtpCheckpoint, expected: Plain) -> None:
    recorder = run(checkpoint, expected, Setup(k=3, num_blocks=16, max_num_seqs=4))
    for turn in range(3):
        recorder.serve(PROMPTS, name=f"{turn}-")
    assert recorder.harness.engine.stats().num_preemptions > 0
    finish(recorder, expected, 40)


@pytest.mark.parametrize("compile_mode", ["native", "off"])
def test_bfloat16_and_other_pieces(compile_mode: Any, made: MakeMtp) -> None:
    """Guards bits that depend on how many rows share a forward."""
    checkpoint = made("mimo", arch="qwen2", num_layers=2)
    setup = Setup(k=3, dtype="bfloat16", compile=compile_mode)
    expected = plain(checkpoint, PROMPTS[:3], setup)
    recorder = run(checkpoint, expected, replace(setup, budget=7))
    recorder.serve(PROMPTS[:3])
    finish(recorder, expected, 8)


def test_the_last_layer_goes_on_with_a_warning(
    made: MakeMtp, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards case 35: layers that are reused behind the user's back, or not at all."""
    checkpoint = made("mimo_v2", num_layers=2)
    for k, warned in ((2, False), (3, True)):
        with caplog.at_level(logging.WARNING):
            Setup(k=k).start(checkpoint.target, **checkpoint.options).close()
        assert ("2 layers and max_draft_tokens is 3; what follows draft 2" in caplog.text) == warned


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_rows_are_those_of_a_table_by_hand(accepted: int, made: MakeMtp) -> None:
    """Guards case 34: token, position and state of every row, of two layers, k = 3 and 7 tokens."""
    checkpoint = made("mimo_v2", num_layers=2)
    setup, prompt = Setup(k=3, graph="eager", max_num_seqs=1), PROMPT[:7]
    truth = plain(checkpoint, [prompt], setup).streams
    recorder = record(checkpoint, setup, truth=truth, accept=(accepted, 0))
    rows = Rows(recorder)
    recorder.harness.add("a", prompt, SamplingParams(max_tokens=9, ignore_eos=True))
    while len(recorder.drafted) < 2:
        recorder.harness.step()
    first, second = (one.drafts for one in recorder.drafted[:2])
    t, last = truth[prompt], 5 + accepted + 1  # the slot of the second step's newest state
    assert recorder.drafted[1].history == t[: last + 2]
    # layer, token, position, state: of the target (-1) or of a layer, and of which slot
    filled = [(0, t[i + 1], i, (-1, i)) for i in range(5)]
    filled += [(1, t[i + 2], i, (0, i)) for i in range(5)]
    drafted = [(0, t[6], 5, (-1, 5)), (1, first[0], 5, (0, 5)), (1, first[1], 6, (1, 5))]
    again = [(0, t[i + 1], i, (-1, i)) for i in range(5, last + 1)]
    again += [(1, t[i + 2], i, (0, i)) for i in range(5, last)]
    again += [(1, second[0], last, (0, last)), (1, second[1], last + 1, (1, last))]
    assert rows.found == filled + drafted + again
    recorder.harness.engine.close()


class Rows:
    """Rows of every run of a layer: (layer, token, position, whose state), padding left out.

    A state is known by its values: it goes by the row that made it, or by the target's KV slot.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.found: list[tuple[int, int, int, tuple[int, int]]] = []
        self._engine = recorder.harness.engine
        self._states: dict[bytes, tuple[int, int]] = {}
        self._forward = recorder.proposer._forward
        recorder.proposer._forward = self._spy  # type: ignore[method-assign]

    def _spy(self, depth: int, views: Any, rows: Any, activations: Any, state: Any) -> None:
        hidden = self._engine.runner.hidden_states
        assert hidden is not None
        size, places = self._engine.kv.block_size, []
        for row, slot in enumerate(rows.slot_mapping.tolist()):
            if slot < size:
                continue
            position = int(rows.positions[row])
            self._states[hidden.storage[slot].numpy().tobytes()] = (-1, position)
            origin = self._states[state[row].numpy().tobytes()]
            self.found.append((depth, int(rows.token_ids[row]), position, origin))
            places.append((row, position))
        self._forward(depth, views, rows, activations, state)
        for row, position in places:
            self._states[state[row].numpy().tobytes()] = (depth, position)


@pytest.mark.parametrize(("num_layers", "k"), [(1, 1), (1, 5), (2, 1), (2, 4), (3, 3), (3, 5)])
def test_perfect_layers_are_always_right(num_layers: int, k: int, tmp_path: Path) -> None:
    """Guards drafts that are right and not accepted, through joins, aborts and preemption."""
    checkpoint = make_perfect(tmp_path, num_layers)
    setup = Setup(k=k, max_num_seqs=6, num_blocks=20, budget=40)
    harness = Harness(setup.start(checkpoint.target, **checkpoint.options))
    harness.run(random_jobs(k, 15, 20))
    check_all_accepted(harness, 60)
    assert harness.engine.stats().num_preemptions > 0
    harness.engine.close()


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_a_step_is_one_replay_of_drafts_and_one_of_the_target(
    num_layers: int, tmp_path: Path
) -> None:
    """Guards a window too narrow for what a step can have verified: every step would fill a gap."""
    checkpoint = make_perfect(tmp_path, num_layers)
    harness = Harness(Setup(k=3).start(checkpoint.target, **checkpoint.options))
    for index in range(2):
        params = SamplingParams(max_tokens=45, ignore_eos=True)
        harness.add(str(index), [8] * (index + 3), params)
    harness.step()
    before = harness.engine.stats()
    for turn in range(1, 8):
        harness.step()
        stats = harness.engine.stats()
        assert sum(stats.replays.values()) - sum(before.replays.values()) == 2 * turn
        assert stats.eager_fallbacks == before.eager_fallbacks
    check_all_accepted(harness, 7 * 2 * 3)
    harness.engine.close()
