"""Workloads of the identity tests: prompts, what speculation off answers to them, seeded schedules.

The answers are taken once for each numerics identity (checkpoint, dtype, compile mode) from an
engine without speculation and with room for everybody; every other run must repeat them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graphengine.sampling.params import SamplingParams
from tests.graphengine.engine.harness import Harness, Job
from tests.graphengine.engine.setups import Setup

PROMPT_LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 16, 17, 24, 31, 33, 40)
MAX_TOKENS = (1, 2, 5, 9, 16, 20, None)
MAX_MODEL_LEN = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What speculation off gives: the truth that every other run is held to."""

    prompt: tuple[int, ...]
    params: SamplingParams
    token_ids: list[int]
    finish_reason: str | None

    @property
    def stream(self) -> list[int]:
        return [*self.prompt, *self.token_ids]


def make_prompts() -> list[tuple[int, ...]]:
    """Random byte prompts of many lengths; every third shares the start of a longer one."""
    draw = random.Random(7)
    longest = tuple(draw.randrange(256) for _ in range(max(PROMPT_LENGTHS)))
    prompts = []
    for index, length in enumerate(PROMPT_LENGTHS):
        fresh = tuple(draw.randrange(256) for _ in range(length))
        shared = length * 3 // 4 if index % 3 == 0 else 0
        prompts.append(longest[:shared] + fresh[shared:])
    return prompts


def answer_off(checkpoint: Path, setup: Setup) -> list[Answer]:
    """Answers to every prompt, half of them cut by a stop id that is known to occur."""
    requests = [
        (prompt, SamplingParams(max_tokens=MAX_TOKENS[index % len(MAX_TOKENS)]))
        for index, prompt in enumerate(make_prompts())
    ]
    plain = _run_off(checkpoint, setup, requests)
    stopped = [
        (
            answer.prompt,
            SamplingParams(
                max_tokens=24, stop_token_ids=(answer.token_ids[len(answer.token_ids) // 2],)
            ),
        )
        for answer in plain
    ]
    return plain + _run_off(checkpoint, setup, stopped)


def _run_off(
    checkpoint: Path, setup: Setup, requests: Sequence[tuple[tuple[int, ...], SamplingParams]]
) -> list[Answer]:
    harness = Harness(setup.start(checkpoint))
    for index, (prompt, params) in enumerate(requests):
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
        for index, (prompt, params) in enumerate(requests)
    ]


def off_setup(dtype: str, compile_mode: str) -> Setup:
    """The setup of `answer_off`: plain decoding, room for everybody, nothing cached."""
    return Setup(
        dtype=dtype,
        compile=compile_mode,
        max_num_seqs=4,
        max_model_len=MAX_MODEL_LEN,
        prefix=False,
    )


def make_jobs(
    answers: Sequence[Answer], *, seed: int, num_requests: int
) -> tuple[list[Job], dict[str, Answer]]:
    """A seeded schedule: bursts of arrivals, prompts that come back, one abort in six.

    Returns:
        The jobs, and the answer that each request id must repeat.
    """
    draw = random.Random(seed)
    jobs, expected = [], {}
    now = 0
    for index in range(num_requests):
        answer = draw.choice(answers)
        request_id = f"job-{index}"
        expected[request_id] = answer
        now += draw.choice((0, 0, 0, 1, 2, 5))
        jobs.append(
            Job(
                request_id=request_id,
                prompt=answer.prompt,
                params=answer.params,
                arrives=now,
                aborts=now + draw.randrange(12) if draw.random() < 1 / 6 else None,
            )
        )
    return jobs, expected


def check_identity(harness: Harness, expected: dict[str, Answer]) -> None:
    """Every stream is the answer; an aborted one is the beginning of it."""
    for request_id, answer in expected.items():
        stream, reason = harness.stream(request_id), harness.reason(request_id)
        if reason == "abort":
            assert stream == answer.token_ids[: len(stream)], f"{request_id} differs before abort"
        else:
            assert stream == answer.token_ids, f"{request_id} differs from speculation off"
            assert reason == answer.finish_reason, f"{request_id} ended for another reason"
