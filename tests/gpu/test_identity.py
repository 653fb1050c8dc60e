"""Speculation on against off on the device: the tiny family, every proposer, random schedules.

The CPU's workloads under the CPU's harness, which poisons what nobody owns before each step and
audits what a step has written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest

from graphengine.sampling.params import SamplingParams
from tests.gpu.device import TARGET, DeviceSetup, draft_options, gpu
from tests.graphengine.engine.harness import Harness
from tests.parity.workload import Answer, answer_off, check_identity, make_jobs

pytestmark = pytest.mark.parity
pytest.importorskip("graphengine.triton_opset")

PROPOSERS = ("ngram", "draft_model", "eagle1", "eagle3", "mtp")
OFF = DeviceSetup(max_num_seqs=4, max_model_len=64, prefix=False, block_size=16)
AnswersOf = Callable[[str, str, bool], list[Answer]]


@pytest.fixture(scope="module")
def answers_of() -> Iterator[AnswersOf]:
    """What plain decoding answers, by attention backend and dtype; sampled or greedy."""

    @cache
    def answers(attention: str, dtype: str, sampled: bool) -> list[Answer]:
        setup = replace(OFF, attention=attention, dtype=dtype)
        found = answer_off(TARGET, setup)
        return [_sampled(setup, one) for one in found] if sampled else found

    yield answers
    answers.cache_clear()


def _sampled(setup: DeviceSetup, answer: Answer) -> Answer:
    """The same request with a seed and every processor, answered anew."""
    params = SamplingParams(
        max_tokens=answer.params.max_tokens,
        temperature=0.8,
        top_p=0.9,
        top_k=40,
        repetition_penalty=1.1,
        seed=len(answer.prompt),
    )
    harness = Harness(setup.start(TARGET))
    harness.add("a", answer.prompt, params)
    harness.drain()
    harness.engine.close()
    return Answer(
        prompt=answer.prompt,
        params=params,
        token_ids=harness.stream("a"),
        finish_reason=harness.reason("a"),
    )


def check(
    setup: DeviceSetup, name: str, answers: list[Answer], *, seed: int, num_requests: int
) -> None:
    """Run a schedule with a proposer and hold every stream to plain decoding."""
    jobs, expected = make_jobs(answers, seed=seed, num_requests=num_requests)
    options = draft_options(name)
    harness = Harness(setup.start(TARGET, **options))
    harness.run(jobs)
    check_identity(harness, expected)
    stats = harness.engine.stats()
    assert stats.num_draft_tokens > 0, "nothing was drafted"
    assert stats.compile_events_after_warmup == 0
    harness.engine.close()


@gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", PROPOSERS)
def test_streams_are_those_of_plain_decoding(
    name: str, dtype: str, answers_of: AnswersOf
) -> None:
    """Greedy requests with arrivals in bursts, aborts, shared prefixes and a pool that is short."""
    answers = answers_of("triton", dtype, False)
    for seed, (k, num_blocks, prefix) in enumerate([(1, None, True), (3, 14, True), (6, 20, False)]):
        setup = replace(
            OFF, attention="triton", dtype=dtype, k=k, num_blocks=num_blocks, prefix=prefix,
            budget=24, max_num_seqs=5, debug=seed == 1,
        )  # fmt: skip
        check(setup, name, answers, seed=seed, num_requests=24)


@gpu
@pytest.mark.parametrize("name", PROPOSERS)
def test_sampled_streams(name: str, answers_of: AnswersOf) -> None:
    answers = answers_of("triton", "bfloat16", True)
    setup = replace(OFF, attention="triton", dtype="bfloat16", k=3, max_num_seqs=6, prefix=True)
    check(setup, name, answers, seed=11, num_requests=24)


@gpu
@pytest.mark.parametrize("launch", ["cuda", "eager", "tape"])
@pytest.mark.parametrize("attention", ["triton", "auto"])
def test_every_way_to_launch(attention: str, launch: str, answers_of: AnswersOf) -> None:
    answers = answers_of("triton", "bfloat16", False) if attention == "triton" else None
    setup = replace(OFF, attention=attention, dtype="bfloat16", k=3, launch=launch)
    answers = answers or answers_of(attention, "bfloat16", False)
    check(setup, "eagle3", answers, seed=3, num_requests=16)


@gpu
def test_flashinfer_where_it_can_serve(checkpoints: object, tmp_path: object) -> None:
    """Heads of 64: the tiny family's are of 32, which FlashInfer does not serve."""
    pytest.importorskip("flashinfer")
    from tests.tiny import make_checkpoint

    folder = make_checkpoint(
        tmp_path / "wide",  # type: ignore[operator]
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )
    setup = replace(OFF, attention="flashinfer", dtype="bfloat16", k=0)
    answers = answer_off(folder, setup)
    jobs, expected = make_jobs(answers, seed=5, num_requests=24)
    harness = Harness(replace(setup, k=4, max_num_seqs=5).start(folder, method="ngram"), poison=False)
    harness.run(jobs)
    check_identity(harness, expected)
    harness.engine.close()


def test_the_body_interpreted() -> None:
    """The same body where there is no GPU: one request of a few tokens, tape for graph."""
    setup = replace(OFF, device="cpu", max_num_seqs=1, max_model_len=24, num_reqs=(1,))
    setup = replace(setup, numerics="fast")
    prompt = (100, 101, 102, 32, 100, 101)
    params = SamplingParams(max_tokens=5)
    plain = Harness(setup.start(TARGET))
    plain.add("a", prompt, params)
    plain.drain()
    answer = Answer(
        prompt=prompt, params=params, token_ids=plain.stream("a"), finish_reason=plain.reason("a")
    )
    plain.engine.close()
    drafting = replace(setup, k=2, draft_lengths=(0, 2))
    check(drafting, "eagle3", [answer], seed=0, num_requests=1)
