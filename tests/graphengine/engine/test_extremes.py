"""Extreme parameters and logits through the engine, with drafts and without: as the docs say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from graphengine.sampling.params import SamplingParams
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Setup, scripted
from tests.tiny import VOCAB_SIZE

PROMPT = (5, 6, 7, 5, 6)
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
WARM = replace(GREEDY, temperature=1.0, seed=8)
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def plain(checkpoints: Checkpoints) -> Harness:
    """Without speculation."""
    return Harness(Setup(logits_processors=True).start(checkpoints.get()))


def answer(harness: Harness, params: SamplingParams) -> list[int]:
    name = f"request-{len(harness.requests)}"
    harness.add(name, PROMPT, params)
    harness.drain()
    return harness.stream(name)


def check_drafts(checkpoints: Checkpoints, params: SamplingParams, stream: list[int]) -> None:
    """Oracle and ragged drafts change nothing."""
    for kind in ("oracle", "ragged"):
        proposer = scripted(kind, {PROMPT: stream})
        setup = Setup(k=3, logits_processors=bool(params.logits_processors))
        harness = Harness(setup.start(checkpoints.get(), proposer))
        assert answer(harness, params) == stream
        assert harness.engine.stats().num_accepted_tokens > 0


SHARP: dict[str, dict[str, Any]] = {
    "tiny temperature": {"temperature": 2.0**-126},
    "top_k 1": {"top_k": 1},
    "tiny top_p": {"top_p": 2.0**-126},
    "min_p 1": {"min_p": 1.0},
}


@pytest.mark.parametrize("name", SHARP)
def test_what_leaves_one_token_is_greedy(
    name: str, checkpoints: Checkpoints, plain: Harness
) -> None:
    """Overflow at a tiny temperature, or a cut that keeps nothing or one too many."""
    params = replace(WARM, **SHARP[name])
    stream = answer(plain, GREEDY)
    assert answer(plain, params) == stream
    check_drafts(checkpoints, params, stream)


NEUTRAL: dict[str, dict[str, Any]] = {
    "top_k 0": {"top_k": 0},
    "top_k -1": {"top_k": -1},
    "top_k V": {"top_k": VOCAB_SIZE},
    "top_k over V": {"top_k": VOCAB_SIZE + 1},
    "largest top_k": {"top_k": (1 << 31) - 1},
    "top_p 1": {"top_p": 1.0},
    "min_p 0": {"min_p": 0.0},
    "bias of 0": {"logit_bias": {3: 0.0}},
    "all allowed": {"allowed_token_ids": tuple(range(VOCAB_SIZE))},
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_what_cuts_nothing_changes_nothing(name: str, plain: Harness) -> None:
    """An off value that is not one."""
    assert answer(plain, replace(WARM, **NEUTRAL[name])) == answer(plain, WARM)


def test_a_huge_temperature_is_uniform(checkpoints: Checkpoints, plain: Harness) -> None:
    """NaN of an overflow, or token 0 for everything."""
    params = replace(WARM, temperature=2.0**127, max_tokens=50)
    stream = answer(plain, params)
    assert len(set(stream)) > 35
    check_drafts(checkpoints, params, stream)


def row(default: float, **numbers: float) -> Any:
    """A logits processor that gives the same row everywhere: by token id, and the rest."""

    def processor(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits.fill_(default)
        for token, number in numbers.items():
            logits[int(token[1:])] = number
        return logits

    return processor


ROWS: dict[str, tuple[Any, set[int]]] = {
    "one number": (row(-INF, t9=-3.0), {9}),
    "one number among NaN": (row(NAN, t9=-3.0), {9}),
    "+inf": (row(1.0, t9=INF), {9}),
    "two +inf": (row(1.0, t9=INF, t4=INF), {4, 9}),
    "+inf and NaN": (row(NAN, t9=INF), {9}),
    "nothing but -inf": (row(-INF), {0}),
    "-inf from id 3 on, NaN before": (row(-INF, t0=NAN, t1=NAN, t2=NAN), {3}),
    "largest and smallest floats": (row(-3.4e38, t9=3.4e38), {9}),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ROWS)
def test_rows_that_are_hardly_rows(
    name: str, temperature: float, checkpoints: Checkpoints, plain: Harness
) -> None:
    """NaN that is chosen or spreads, a row without a choice that stops the engine."""
    processor, allowed = ROWS[name]
    params = replace(WARM, temperature=temperature, logits_processors=(processor,))
    stream = answer(plain, params)
    assert set(stream) <= allowed
    assert temperature == 1.0 or set(stream) == {min(allowed)}
    if name == "two +inf":
        assert temperature == 0.0 or set(stream) == allowed
        check_drafts(checkpoints, params, stream)


def test_mates_of_such_a_row_keep_their_tokens(plain: Harness) -> None:
    """NaN of one request in another's row."""
    expected = answer(plain, WARM)
    bad = replace(WARM, logits_processors=(row(NAN),))
    for name, params in (("bad", bad), ("mate", WARM)):
        plain.add(name, PROMPT, params)
    plain.drain()
    assert plain.stream("mate") == expected
