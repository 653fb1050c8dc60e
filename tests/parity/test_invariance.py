"""A row's logits, bit for bit, whatever shares its step: each numerics identity against itself.

Logits of every emitted row are collected by (request, position) and compared with those of a plain
run: batches, draft lengths, truncation, chunks, cache hits, recompute, padding and launchers change
how a row is computed and must not change one bit of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest

from graphengine.sampling.params import SamplingParams
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Setup, scripted
from tests.tiny import VOCAB_SIZE

pytestmark = pytest.mark.parity

PARAMS = SamplingParams(max_tokens=18, ignore_eos=True)
IDENTITIES = [(c, d) for c in ("native", "off", "inductor") for d in ("float32", "bfloat16")]
# What torch.compile builds depends on these two, so every variant keeps them.
BASE = Setup(k=6, max_num_seqs=6, max_model_len=128, prefix=False)


def make_prompts() -> dict[str, tuple[int, ...]]:
    """Lengths around block edges and the kernels' KV chunks; the longest meets the limit."""
    draw = random.Random(13)
    shared = tuple(draw.randrange(256) for _ in range(44))
    prompts = {}
    for index, length in enumerate((1, 3, 4, 5, 16, 31, 46, 52, 70, 121)):
        tokens = tuple(draw.randrange(256) for _ in range(length))
        prompts[str(index)] = shared + tokens[44:] if length > 45 else tokens
    return prompts


PROMPTS = make_prompts()


@dataclass(frozen=True, slots=True)
class Truth:
    """Streams and logits of a plain run: alone, one token a step, nothing cached."""

    records: dict[str, list[int]]
    logits: dict[tuple[str, int], np.ndarray]


TruthOf = Callable[[str, str, str], Truth]


@pytest.fixture(scope="module")
def truth_of(checkpoints: Checkpoints) -> Iterator[TruthOf]:
    """Truths by (compile mode, dtype, checkpoint), each run once; one request at a time."""

    @cache
    def truth(compile_mode: str, dtype: str, name: str = "llama") -> Truth:
        setup = replace(BASE, compile=compile_mode, dtype=dtype)
        harness = Harness(
            setup.start(checkpoints.get(name), scripted("empty", {})), keep_logits=True
        )
        for request_id, prompt in PROMPTS.items():
            harness.add(request_id, prompt, PARAMS)
            harness.drain()
        harness.engine.close()
        records = {key: [*prompt, *harness.stream(key)] for key, prompt in PROMPTS.items()}
        return Truth(records, harness.logits)

    yield truth
    truth.cache_clear()


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Another way to compute the same rows; it must show that it took that way."""

    setup: Setup
    script: str = "oracle"
    accept: int = 0
    twice: bool = False  # the second round finds the first in the cache
    one_by_one: bool = False
    shows: Callable[[Harness], bool] = lambda harness: True


def num_rejected(harness: Harness) -> int:
    stats = harness.engine.stats()
    return stats.num_draft_tokens - stats.num_accepted_tokens


VARIANTS: dict[str, Variant] = {
    "batched": Variant(
        setup=BASE, script="empty", shows=lambda h: max(h.batch_sizes) == BASE.max_num_seqs
    ),
    "k-alone": Variant(
        setup=BASE, one_by_one=True, shows=lambda h: h.engine.stats().replays["1x7:greedy"] > 0
    ),
    "k-batched": Variant(setup=BASE, shows=lambda h: h.engine.stats().replays["6x7:greedy"] > 0),
    "rejected": Variant(setup=BASE, script="junk", shows=lambda h: num_rejected(h) > 100),
    "two-accepted": Variant(
        setup=BASE, script="exactly", accept=2, shows=lambda h: num_rejected(h) > 50
    ),
    "ragged": Variant(setup=BASE, script="ragged", shows=lambda h: num_rejected(h) > 10),
    "chunks-of-7": Variant(
        setup=replace(BASE, budget=7),
        shows=lambda h: h.engine.stats().eager_fallbacks["prefill"] > 40,
    ),
    "whole-prompts": Variant(setup=replace(BASE, chunked=False)),
    "prefix-hits": Variant(
        setup=replace(BASE, prefix=True),
        twice=True,
        shows=lambda h: sum(r.metrics.num_cached_tokens for r in h.requests.values()) > 300,
    ),
    "preempted": Variant(
        setup=replace(BASE, num_blocks=34),
        script="ragged",
        shows=lambda h: h.engine.stats().num_preemptions > 0,
    ),
    "preempted-chunks": Variant(
        setup=replace(BASE, num_blocks=34, budget=9, prefix=True),
        script="ragged",
        shows=lambda h: h.engine.stats().num_preemptions > 0,
    ),
    "padded": Variant(
        setup=replace(BASE, max_num_seqs=6, draft_lengths=(6,), num_reqs=(4,)),
        script="ragged",
        shows=lambda h: h.engine.stats().padding_rows > 0,
    ),
    "blocks-of-1": Variant(setup=replace(BASE, block_size=1)),
    "blocks-of-16": Variant(setup=replace(BASE, block_size=16), script="ragged"),
    "compiled": Variant(setup=replace(BASE, graph="compiled"), script="ragged"),
    "eager": Variant(setup=replace(BASE, graph="eager"), script="ragged"),
}
# torch.compile takes seconds for each engine, so most of these run with `slow`.
FEW = {("float32", "ragged"), ("float32", "preempted-chunks"), ("bfloat16", "ragged")}
INDUCTOR = [
    pytest.param(("inductor", dtype), name, marks=[] if (dtype, name) in FEW else pytest.mark.slow)
    for dtype in ("float32", "bfloat16")
    for name in VARIANTS
]


def check(
    variant: Variant, identity: tuple[str, str], checkpoint: tuple[str, Checkpoints], truth: Truth
) -> None:
    compile_mode, dtype = identity
    name, checkpoints = checkpoint
    setup = replace(variant.setup, compile=compile_mode, dtype=dtype)
    records = truth.records | {f"{key}-again": stream for key, stream in truth.records.items()}
    proposer = scripted(variant.script, records, accept=variant.accept, seed=1)
    harness = Harness(setup.start(checkpoints.get(name), proposer), keep_logits=True)
    for suffix in ("", "-again") if variant.twice else ("",):
        for key, prompt in PROMPTS.items():
            harness.add(key + suffix, prompt, PARAMS)
            if variant.one_by_one:
                harness.drain()
        harness.drain()
    assert variant.shows(harness), "the run did not take the way that it is there for"
    rounds = 2 if variant.twice else 1
    assert len(harness.logits) == rounds * len(truth.logits)
    for (request_id, position), logits in harness.logits.items():
        expected = truth.logits[request_id.removesuffix("-again"), position]
        assert logits.tobytes() == expected.tobytes(), (
            f"request {request_id}, position {position}: largest difference "
            f"{np.abs(logits - expected).max():.3g}"
        )
    harness.engine.close()


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("identity", IDENTITIES[:4], ids="-".join)
def test_bits(
    identity: tuple[str, str], name: str, checkpoints: Checkpoints, truth_of: TruthOf
) -> None:
    """Logits that depend on company, draft length, chunks, cache, recompute, padding, launcher."""
    check(VARIANTS[name], identity, ("llama", checkpoints), truth_of(*identity, "llama"))


@pytest.mark.parametrize(("identity", "name"), INDUCTOR)
def test_bits_inductor(
    identity: tuple[str, str], name: str, checkpoints: Checkpoints, truth_of: TruthOf
) -> None:
    """As above through inductor, whose kernels for one row and for many are different code."""
    check(VARIANTS[name], identity, ("llama", checkpoints), truth_of(*identity, "llama"))


@pytest.mark.parametrize("name", ["ragged", "preempted-chunks"])
@pytest.mark.parametrize("checkpoint", ["qwen3", "window"])
def test_bits_of_other_models(
    checkpoint: str, name: str, checkpoints: Checkpoints, truth_of: TruthOf
) -> None:
    """As above for q/k norms, biases and a sliding window that chunks cut."""
    identity = ("native", "bfloat16")
    truth = truth_of(*identity, checkpoint)
    check(VARIANTS[name], identity, (checkpoint, checkpoints), truth)


@pytest.mark.parametrize(
    "identity",
    [*IDENTITIES[:4], pytest.param(IDENTITIES[4], marks=pytest.mark.slow)],
    ids="-".join,
)
def test_planted_ties_go_to_the_lowest_id(
    identity: tuple[str, str], checkpoints: Checkpoints, truth_of: TruthOf
) -> None:
    """Two ids with the same logit: the higher one must win in no mode, drafted or not."""
    compile_mode, dtype = identity
    half = VOCAB_SIZE // 2
    truth = truth_of(compile_mode, dtype, "ties")
    for logits in truth.logits.values():
        assert logits[:half].tobytes() == logits[half : 2 * half].tobytes(), "no tie was planted"
    outputs = [stream[len(PROMPTS[key]) :] for key, stream in truth.records.items()]
    assert max(map(max, outputs)) < half
    setup = replace(BASE, compile=compile_mode, dtype=dtype)
    # The other half of each tie is drafted: a draft that ties is still not the target's token.
    twins = {
        key: stream[: len(PROMPTS[key])] + [token + half for token in stream[len(PROMPTS[key]) :]]
        for key, stream in truth.records.items()
    }
    for script, records in (("oracle", truth.records), ("twins", twins)):
        proposer = scripted("oracle" if script == "oracle" else "empty", truth.records)
        harness = Harness(setup.start(checkpoints.get("ties"), proposer))
        if script == "twins":
            proposer.draft_row = (
                lambda request_id, history, allowance, records=records: records[  # type: ignore[method-assign, misc]
                    request_id
                ][len(history) : len(history) + allowance]
            )
        for key, prompt in PROMPTS.items():
            harness.add(key, prompt, PARAMS)
        harness.drain()
        for key, prompt in PROMPTS.items():
            assert [*prompt, *harness.stream(key)] == truth.records[key]
        accepted = harness.engine.stats().num_accepted_tokens
        assert accepted > 0 if script == "oracle" else accepted == 0
        harness.engine.close()
