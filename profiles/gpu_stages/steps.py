"""Steps of an engine on the device: over their bandwidth floor, and verifying over plain.

A floor is what a step has to read (matrices, KV) at the speed of a copy in the same run. A step's
time is the device's, from before the replay to behind it, and, apart, the host's whole turn.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from capture.config import CaptureConfig
from graphengine.bench.ratios import median_interval
from graphengine.bench.steps import held
from graphengine.config import CacheConfig, EngineConfig
from graphengine.engine import Engine
from graphengine.sampling.params import SamplingParams
from graphengine.speculative_config import SpeculativeConfig
from profiles.gpu_stages.base import Clock, Context, Stage, copy_bandwidth
from profiles.inflate import Sizes
from proposers.base import Draft

BATCHES, LENGTHS, CONTEXT = (1, 4, 16, 64), tuple(range(8)), 512
TURNS = 30
Turns = dict[int, list[float]]


def open_engine(
    model: str | Path, device: str, batches: Sequence[int], lengths: Sequence[int], context: int
) -> Engine:
    """An engine whose cells are captured when they are used."""
    longest = max(lengths)
    config = EngineConfig(
        device=device,
        dtype="bfloat16",
        max_model_len=context + 2 * longest + 32 + max(batches),
        max_num_seqs=max(batches),
        speculative=SpeculativeConfig("ngram", max_draft_tokens=longest, adaptive=False),
        capture=CaptureConfig(num_reqs=tuple(batches), draft_lengths=tuple(lengths), lazy=True),
        cache=CacheConfig(enable_prefix_caching=False, max_bytes=16 << 30),
    )
    return Engine(model, config)


@contextmanager
def watched(engine: Engine, clock: Clock) -> Iterator[list[float]]:
    """Device seconds of every replay in the block, in order."""
    manager, stream = engine.runner.manager, engine.runner.stream
    replay, marks, seconds = manager.replay, [], []

    def timed(*args: Any, **named: Any) -> None:
        stream.run(lambda: marks.append(clock.mark()))
        replay(*args, **named)
        stream.run(lambda: marks.append(clock.mark()))

    manager.replay = timed  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        manager.replay = replay  # type: ignore[method-assign]
        stream.synchronize()
        seconds += [clock.between(*marks[at : at + 2]) for at in range(0, len(marks), 2)]


def time_steps(
    engine: Engine, batch_size: int, lengths: Sequence[int], context: int, turns: int
) -> tuple[Turns, Turns]:
    """Device and host seconds of steps of the same requests by draft length, in turns."""
    longest = max(lengths)
    vocab_size = min(engine.resolved.model.vocab_size, 250)
    generator = np.random.default_rng(batch_size)
    prompts = generator.integers(0, vocab_size, (batch_size, context)).tolist()
    params = SamplingParams(max_tokens=longest + 16 + batch_size, ignore_eos=True)
    drafts = {k: Draft.from_rows([[0] * k] * batch_size, k) for k in lengths}
    clock = Clock(engine.resolved.device)
    host: Turns = {k: [] for k in lengths}
    with (
        held(engine, prompts, [params] * batch_size, longest) as requests,
        watched(engine, clock) as seconds,
    ):
        for _ in range(turns + 1):
            for k in lengths:
                for request in requests:  # nothing is committed: every step is the same one
                    engine.state.follow(request)
                start = time.perf_counter()
                engine.runner.verify(requests, drafts[k]).packed()
                host[k].append(time.perf_counter() - start)
    device = {k: seconds[at :: len(lengths)][1:] for at, k in enumerate(lengths)}
    return device, {k: values[1:] for k, values in host.items()}


def against_floor(
    sizes: Sizes, batch_size: int, k: int, context: int, seconds: float, bandwidth: float
) -> dict[str, Any]:
    """A step beside the time that its bytes take."""
    num_bytes = sizes.step_bytes(num_reqs=batch_size, kv_len=context + k + 1)
    floor = num_bytes / bandwidth
    return {
        "batch_size": batch_size,
        "k": k,
        "seconds": seconds,
        "floor_bytes": num_bytes,
        "floor_seconds": floor,
        "over_floor": seconds / floor,
    }


def ratio(values: Turns, k: int) -> dict[str, float]:
    """Turns of k over those of plain decoding."""
    pairs = zip(values[k], values[0], strict=True)
    return asdict(median_interval([one / base for one, base in pairs]))


def floor(context: Context) -> None:
    """The 8B shape, every batch and draft length; on the CPU a small one, to try the stage."""
    small = context.device == "cpu"
    preset, batches, length = ("small", (1, 2), 32) if small else ("8b", BATCHES, CONTEXT)
    lengths, turns = ((0, 5), 5) if small else (LENGTHS, TURNS)
    start = time.perf_counter()
    folder, sizes = context.inflated(preset)
    context.keep(
        target=f"the tiny target, cost-inflated to {preset}: real acceptance, not a real model",
        context=length,
        inflate_seconds=time.perf_counter() - start,
    )
    bandwidth = copy_bandwidth(context.torch_device)
    context.keep(copy_bytes_per_second=bandwidth)
    engine = open_engine(folder, context.device, batches, lengths, length)
    context.keep(start_seconds=dict(engine.start_times.seconds))
    context.keep(capture_report=engine.capture_report().splitlines()[0])
    for batch_size in batches:
        device, host = time_steps(engine, batch_size, lengths, length, turns)
        for k in lengths:
            row = against_floor(sizes, batch_size, k, length, median(device[k]), bandwidth)
            row |= {"host_seconds": median(host[k]), "over_plain": ratio(device, k)}
            context.row(f"{batch_size} x {k}", row)
    context.keep(copy_bytes_per_second_after=copy_bandwidth(context.torch_device))
    engine.close()


def verify_k5(context: Context) -> None:
    """The small model at batch 1: a step of 6 rows over a plain one, device and host."""
    model, name = context.small_model()
    context.keep(model=name)
    engine = open_engine(model, context.device, (1,), (0, 5), 128)
    turns = 10 if context.device == "cpu" else 200
    device, host = time_steps(engine, 1, (0, 5), 128, turns)
    for what, values in (("device", device), ("host", host)):
        seconds = {str(k): median(one) for k, one in values.items()}
        context.row(what, {"seconds": seconds, "over_plain": ratio(values, 5)})
    engine.close()


STAGES = (
    Stage(name="floor", about="the 8B shape over its bandwidth floor", seconds=240, run=floor),
    Stage(name="verify-k5", about="6 rows over 1, small model", seconds=60, run=verify_k5),
)
