"""Engines whose whole steps are measured: fixed batch, fixed drafts, nothing that ends.

Owns how they are opened and filled. Drafts are junk by default, so that every step verifies k of
them and adds a token, whatever the model says.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from capture.config import CaptureConfig, GraphKind
from graphengine.config import CacheConfig, EngineConfig
from graphengine.engine import Engine
from graphengine.sampling.params import SamplingParams
from graphengine.speculative_config import SpeculativeConfig
from proposers.mock import JunkProposer

JUNK = "junk"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `open_engine` reads."""
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compile", default="auto", help="as CaptureConfig.compile")
    parser.add_argument("--context", type=int, default=100, help="prompt tokens of each request")
    parser.add_argument(
        "--speculate", default=JUNK, help="a proposer; junk: drafts that are never right, for free"
    )
    parser.add_argument("--draft-model", help="for proposers that carry one")


def open_engine(
    args: argparse.Namespace,
    graph: GraphKind,
    batch_sizes: Sequence[int],
    draft_lengths: Sequence[int],
    num_steps: int,
) -> Engine:
    """An engine with the cells of these steps alone, and room for `num_steps` of them."""
    longest = max(draft_lengths)
    junk = args.speculate == JUNK
    method = "ngram" if junk else args.speculate
    speculative = SpeculativeConfig(
        method,
        model=None if junk else args.draft_model,
        max_draft_tokens=max(longest, 1),
        adaptive=False,
    )
    room = num_steps if junk else num_steps * (longest + 1)  # tokens that a request may get
    config = EngineConfig(
        dtype=args.dtype,
        device=args.device,
        max_model_len=args.context + 2 * room + 2 * longest + 64,
        max_num_seqs=max(batch_sizes),
        max_num_batched_tokens=max(batch_sizes) * (args.context + longest + 1),
        speculative=speculative,
        capture=CaptureConfig(
            graph=graph,
            num_reqs=tuple(batch_sizes),
            draft_lengths=(0, *draft_lengths),
            compile=args.compile,
        ),
        cache=CacheConfig(enable_prefix_caching=False),
    )
    proposer = JunkProposer(vocab_size=2, token_id=0) if junk else None
    return Engine(args.model, config, proposer=proposer)


def fill(engine: Engine, batch_size: int, k: int, context: int, warm_up: int) -> None:
    """Replace what runs by `batch_size` decoding requests of k drafts a step, warmed up."""
    engine.discard([request.request_id for request in engine.scheduler.running])
    engine.start_afresh()
    engine.draft_limit = k
    vocab_size = engine.resolved.model.vocab_size
    limit = engine.resolved.sizes.max_model_len - context
    for index in range(batch_size):
        generator = np.random.default_rng(index)
        prompt = [int(token) for token in generator.integers(0, vocab_size, size=context)]
        params = SamplingParams(max_tokens=limit, ignore_eos=True)
        engine.add_request(f"measured-{index}", prompt, params)
    while not (
        _runs(engine, batch_size) and all(one.is_decode_ready for one in engine.scheduler.running)
    ):
        engine.step()
    for _ in range(warm_up):
        engine.step()


def check_running(engine: Engine, batch_size: int) -> None:
    """AssertionError where requests have ended, so that steps were not what they are called."""
    assert _runs(engine, batch_size), f"{len(engine.scheduler.running)} of {batch_size} still run"


def streams(engine: Engine) -> list[list[int]]:
    """Tokens of what runs, by id."""
    requests = sorted(engine.scheduler.running, key=lambda one: one.request_id)
    return [list(request.token_ids) for request in requests]


def _runs(engine: Engine, batch_size: int) -> bool:
    return len(engine.scheduler.running) == batch_size
