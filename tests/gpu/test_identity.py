"""Speculation on against off on the device: the tiny family, every proposer, random schedules.

The CPU's workloads under the CPU's harness, which poisons what nobody owns before each step and
audits what a step has written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from graphengine.sampling.params import SamplingParams
from tests.gpu.device import TARGET, DeviceSetup, cases, draft_options, gpu
from tests.graphengine.engine.harness import Harness
from tests.parity.workload import Answer, answer_off, check_identity, make_jobs
from tests.tiny import make_checkpoint

pytestmark = pytest.mark.parity

PROPOSERS = ("ngram", "draft_model", "eagle1", "eagle3", "mtp")
OFF = DeviceSetup(max_num_seqs=4, max_model_len=64, prefix=False, block_size=16)
# Draft length, blocks in the pool, prefix cache.
RUNS = {"cpu": [(3, 14, True)], "cuda": [(1, None, True), (3, 14, True), (6, 20, False)]}
AnswersOf = Callable[[DeviceSetup, bool], list[Answer]]


@pytest.fixture(scope="module")
def answers_of() -> Iterator[AnswersOf]:
    """What plain decoding answers in a setup; sampled or greedy."""

    @cache
    def answers(setup: DeviceSetup, sampled: bool = False) -> list[Answer]:
        found = answer_off(TARGET, setup)
        return _sampled(setup, found) if sampled else found

    yield answers
    answers.cache_clear()


def _sampled(setup: DeviceSetup, answers: list[Answer]) -> list[Answer]:
    """The same requests with a seed and every processor, answered anew."""
    harness = Harness(setup.start(TARGET))
    asked = []
    for index, one in enumerate(answers):
        params = SamplingParams(
            max_tokens=one.params.max_tokens,
            temperature=0.8,
            top_p=0.9,
            top_k=40,
            repetition_penalty=1.1,
            seed=index,
        )
        harness.add(str(index), one.prompt, params)
        asked.append(params)
    harness.drain()
    harness.engine.close()
    return [
        Answer(
            prompt=one.prompt,
            params=params,
            token_ids=harness.stream(str(index)),
            finish_reason=harness.reason(str(index)),
        )
        for index, (one, params) in enumerate(zip(answers, asked, strict=True))
    ]


def check(
    setup: DeviceSetup, name: str, answers: list[Answer], *, seed: int, num_requests: int
) -> None:
    """Run a schedule with a proposer and hold every stream to plain decoding."""
    jobs, expected = make_jobs(answers, seed=seed, num_requests=num_requests)
    harness = Harness(setup.start(TARGET, **draft_options(name)))
    harness.run(jobs)
    check_identity(harness, expected)
    stats = harness.engine.stats()
    assert stats.num_draft_tokens > 0, "nothing was drafted"
    assert stats.compile_events_after_warmup == 0
    harness.engine.close()


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=gpu)])
@pytest.mark.parametrize(("device", "name"), cases(["ngram", "mtp"], PROPOSERS))
def test_streams_are_those_of_plain_decoding(
    device: str, name: str, dtype: str, answers_of: AnswersOf
) -> None:
    """Greedy requests with arrivals in bursts, aborts, shared prefixes and a pool that is short."""
    off = replace(OFF, device=device, attention="triton", dtype=dtype)
    answers = answers_of(off, False)
    for seed, (k, num_blocks, prefix) in enumerate(RUNS[device]):
        setup = replace(off, k=k, num_blocks=num_blocks, prefix=prefix, budget=24, debug=seed == 1)
        setup = replace(setup, max_num_seqs=5)
        check(setup, name, answers, seed=seed, num_requests=24 if device == "cuda" else 6)


@pytest.mark.parametrize(("device", "name"), cases(["eagle3"], PROPOSERS))
def test_sampled_streams(device: str, name: str, answers_of: AnswersOf) -> None:
    off = replace(OFF, device=device, attention="triton", dtype="bfloat16")
    answers = answers_of(off, True)
    setup = replace(off, k=3, max_num_seqs=6, prefix=True)
    check(setup, name, answers, seed=11, num_requests=24 if device == "cuda" else 6)


@gpu
@pytest.mark.parametrize("launch", ["cuda", "eager", "compiled", "tape"])
def test_every_way_to_launch(launch: str, answers_of: AnswersOf) -> None:
    off = replace(OFF, attention="triton", dtype="bfloat16")
    setup = replace(off, k=3, launch=launch, max_num_seqs=5)
    check(setup, "eagle3", answers_of(off, False), seed=3, num_requests=16)


@gpu
@pytest.mark.parametrize("attention", ["flashinfer", "auto"])
def test_attention_by_flashinfer(attention: str, tmp_path: Path) -> None:
    """Heads of 64, which it serves; the tiny family's are of 32.

    Nothing is poisoned: it multiplies by zero what the mask hides, in slots that must be finite.
    """
    pytest.importorskip("flashinfer")
    heads = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 64}
    folder = make_checkpoint(tmp_path / "wide", num_key_value_heads=2, **heads)
    off = replace(OFF, attention=attention, dtype="bfloat16")
    jobs, expected = make_jobs(_answers(off, folder), seed=5, num_requests=24)
    harness = Harness(replace(off, k=4, max_num_seqs=5).start(folder), poison=False)
    harness.run(jobs)
    check_identity(harness, expected)
    harness.engine.close()


def _answers(setup: DeviceSetup, folder: Path) -> list[Answer]:
    harness = Harness(setup.start(folder), poison=False)
    prompts = [tuple(range(start, start + length)) for start, length in ((5, 1), (9, 17), (70, 40))]
    params = SamplingParams(max_tokens=20)
    for index, prompt in enumerate(prompts):
        harness.add(str(index), prompt, params)
    harness.drain()
    harness.engine.close()
    return [
        Answer(
            prompt=prompt,
            params=params,
            token_ids=harness.stream(str(index)),
            finish_reason=harness.reason(str(index)),
        )
        for index, prompt in enumerate(prompts)
    ]
