"""Step times: what one captured step costs, plain and verifying, at a given context.

Owns the timing of single replays. The step is timed as the engine runs it (rows reserved, inputs
written, attention planned, cell replayed) but nothing is committed, so that it can be repeated on
the same state. The engine's statistics count these launches as replays, and as no step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from graphengine.engine import Engine
from graphengine.request import Request
from graphengine.sampling.params import SamplingParams
from proposers.base import Draft


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Median seconds of a step of `batch_size` requests with `k` drafts each."""

    batch_size: int
    k: int
    context: int  # tokens before the step, each request
    seconds: float
    num_replays: int


def step_times(
    engine: Engine,
    *,
    batch_size: int,
    draft_lengths: Sequence[int],
    context: int,
    num_replays: int,
) -> list[StepTime]:
    """Time a step at each draft length, taking turns replay by replay.

    Args:
        engine: idle.
        batch_size: requests in the step, at most `max_num_seqs`.
        draft_lengths: each at most `max_draft_tokens`; 0 is the plain step.
        context: prompt tokens of each request, at most `max_model_len - max(draft_lengths) - 2`.
        num_replays: timed replays of each.

    Raises:
        ValueError: the context or the drafts behind it do not fit.
    """
    longest = max(draft_lengths)
    room = engine.resolved.sizes.max_model_len - longest - 2
    if context > room:
        raise ValueError(f"a context of {context} tokens does not fit: at most {room} do")
    max_tokens = longest + 2 + _setup_steps(engine, batch_size * context, batch_size)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    vocab_size = engine.resolved.model.vocab_size
    prompts = [_prompt(context, index, vocab_size) for index in range(batch_size)]
    with held(engine, prompts, [params] * batch_size, longest) as requests:
        seconds = _time(engine, requests, draft_lengths, num_replays)
    return [
        StepTime(
            batch_size=batch_size,
            k=k,
            context=context,
            seconds=float(np.median(seconds[k])),
            num_replays=num_replays,
        )
        for k in draft_lengths
    ]


@contextmanager
def held(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    num_draft_tokens: int,
) -> Iterator[list[Request]]:
    """Requests that stand before a step, in order, with blocks reserved for its rows.

    They are gone when the context ends.

    Args:
        engine: idle; has room for all of them at once.
        params: one each; none may end before all have been prefilled.
        num_draft_tokens: of the widest step.

    Raises:
        ValueError: the drafts do not fit behind the prompts.
    """
    assert not engine.has_unfinished_requests(), "a measured engine must have no other requests"
    request_ids = [f"held-{index}" for index in range(len(prompts))]
    try:
        for request_id, prompt, one in zip(request_ids, prompts, params, strict=True):
            engine.add_request(request_id, prompt, one)
        found = {request.request_id: request for request in _decoding(engine, len(prompts))}
        requests = [found[request_id] for request_id in request_ids]
        _reserve(engine, requests, num_draft_tokens)
        yield requests
    finally:
        engine.discard(request_ids)


def _prompt(num_tokens: int, index: int, vocab_size: int) -> list[int]:
    generator = np.random.default_rng(index)
    return [int(token) for token in generator.integers(0, vocab_size, size=num_tokens)]


def _setup_steps(engine: Engine, num_tokens: int, batch_size: int) -> int:
    """Most steps until all are prefilled, in each of which the first ones may emit a token."""
    a_step = max(1, engine.resolved.scheduler.max_num_batched_tokens - batch_size)
    return batch_size - num_tokens // -a_step


def _decoding(engine: Engine, batch_size: int) -> list[Request]:
    """Step until every request is decode-ready."""
    drafting, engine.draft_limit = engine.draft_limit, 0  # who waits goes on by a token a step
    try:
        return _step_until_decoding(engine, batch_size)
    finally:
        engine.draft_limit = drafting


def _step_until_decoding(engine: Engine, batch_size: int) -> list[Request]:
    while True:
        running = engine.scheduler.running
        if len(running) == batch_size and all(request.is_decode_ready for request in running):
            return list(running)
        engine.step()
        assert engine.has_unfinished_requests(), "the requests ended before they could be timed"


def _reserve(engine: Engine, requests: Sequence[Request], num_draft_tokens: int) -> None:
    """Blocks for the rows of the widest step, as the scheduler would reserve them."""
    for request in requests:
        granted = 0
        if engine.kv.reserve_rows(request, 1):
            granted = engine.kv.reserve_speculative(request, num_draft_tokens)
        if granted < num_draft_tokens:
            raise ValueError(
                f"no room for {num_draft_tokens} drafts behind {request.num_tokens} tokens in a "
                f"batch of {len(requests)}: raise max_model_len or the number of KV blocks, or "
                "lower context or batch size"
            )
        engine.state.follow(request)


def _time(
    engine: Engine,
    requests: Sequence[Request],
    draft_lengths: Sequence[int],
    num_replays: int,
) -> dict[int, list[float]]:
    runner = engine.runner
    drafts = {k: Draft.from_rows([[0] * k] * len(requests), k) for k in draft_lengths}
    seconds: dict[int, list[float]] = {k: [] for k in draft_lengths}
    for turn in range(num_replays + 1):
        for k in draft_lengths:
            for request in requests:  # nothing is committed: every step is the same one
                engine.state.follow(request)
            start = time.perf_counter()
            runner.verify(requests, drafts[k]).packed()
            if turn > 0:  # the first is a warm-up
                seconds[k].append(time.perf_counter() - start)
    return seconds
