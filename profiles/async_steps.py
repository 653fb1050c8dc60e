"""Asynchronous against synchronous stepping on the real model: the same tokens, and the time.

Two engines in one process serve the same script in turns: prompts that arrive and are aborted at
random steps, with `--blocks 34` in a pool that is too small for all, so that some are preempted.
Every stream of the one is held to the other's (an aborted one as far as it has come). The ratio is
of whole scripts.

    python -m profiles.async_steps --out profiles/results/async_steps.json
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graphengine import CacheConfig, EngineConfig, SamplingParams
from graphengine.bench.environment import command_line, describe
from graphengine.bench.ratios import median_interval
from graphengine.bench.results_file import check_target, write_json
from graphengine.bench.workloads import encode, load_all
from graphengine.engine import Engine
from graphengine.models.locate import DEMO_MODEL
from graphengine.speculative_config import SpeculativeConfig

PROMPTS = Path(__file__).parent / "prompts" / "identity.json"
BLOCK_SIZE = 16  # a request may need 20 of these
MAX_MODEL_LEN = 320


@dataclass(frozen=True)
class Asked:
    """A request of a script."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    arrives: int
    aborts: int | None


def script(prompts: list[list[int]], seed: int, max_tokens: int) -> list[Asked]:
    """Arrivals, parameters and aborts by chance."""
    draw = random.Random(seed)
    asked = []
    for index, token_ids in enumerate(prompts):
        params: dict[str, Any] = {"max_tokens": max_tokens}
        if draw.random() < 0.5:
            params |= {"temperature": 0.8, "seed": index, "top_p": 0.95}
        if draw.random() < 0.2:
            params |= {"repetition_penalty": 1.1}
        arrives = draw.randrange(3 * len(prompts))
        aborts = arrives + draw.randrange(1, max_tokens) if draw.random() < 0.25 else None
        room = MAX_MODEL_LEN - max_tokens - 1
        asked.append(Asked(str(index), token_ids[:room], SamplingParams(**params), arrives, aborts))
    return asked


def serve(engine: Engine, asked: list[Asked]) -> tuple[dict[str, list[int]], float]:
    """Tokens by request, and seconds of the whole script."""
    found: dict[str, list[int]] = {}
    start, now = time.perf_counter(), 0
    last = max(max(one.arrives, one.aborts or 0) for one in asked)
    while now <= last or engine.has_unfinished_requests():
        for one in asked:
            if one.arrives == now:
                engine.add_request(one.request_id, one.token_ids, one.params)
            if one.aborts == now:
                engine.abort(one.request_id)
        for output in engine.step():
            found[output.request_id] = output.outputs[0].token_ids
        now += 1
    return found, time.perf_counter() - start


def compare(
    sync: dict[str, list[int]], late: dict[str, list[int]], asked: list[Asked]
) -> dict[str, int]:
    """Tokens compared and requests that differ."""
    compared = differing = 0
    for one in asked:
        first, second = sync.get(one.request_id, []), late.get(one.request_id, [])
        common = min(len(first), len(second))
        compared += common
        same = first[:common] == second[:common]
        differing += not (same and (one.aborts is not None or len(first) == len(second)))
    return {"tokens": compared, "differing": differing}


def measure(args: argparse.Namespace, max_num_seqs: int, drafts: str | None) -> dict[str, Any]:
    """One cell: several scripts, each by both engines, in turns."""
    engines = [
        Engine(
            args.model,
            EngineConfig(
                max_num_seqs=max_num_seqs,
                max_model_len=MAX_MODEL_LEN,
                async_steps=async_steps,
                cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=args.blocks),
                speculative="off"
                if drafts is None
                else SpeculativeConfig("eagle", model=drafts, max_draft_tokens=3, adaptive=False),
            ),
        )
        for async_steps in (0, 1)
    ]
    groups = load_all((PROMPTS,)).values()
    encoded = [encode(engines[0].tokenizer, one) for group in groups for one in group]
    totals, ratios = {"tokens": 0, "differing": 0}, []
    for turn in range(args.scripts):
        chosen = encoded[turn * args.prompts :][: args.prompts]
        asked = script(chosen, turn, args.max_tokens)
        runs = {}
        for index in (0, 1) if turn % 2 else (1, 0):
            engines[index].reset_prefix_cache()
            runs[index] = serve(engines[index], asked)
        for name, value in compare(runs[0][0], runs[1][0], asked).items():
            totals[name] += value
        ratios.append(runs[0][1] / runs[1][1])
    stats = [engine.stats() for engine in engines]
    for engine in engines:
        engine.close()
    return {
        "max_num_seqs": max_num_seqs,
        "num_blocks": args.blocks,
        "drafts": "off" if drafts is None else "eagle k=3",
        **totals,
        "preemptions": [one.num_preemptions for one in stats],
        "sync_over_async": asdict(median_interval(ratios)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--draft", help="EAGLE checkpoint; cells with drafts are run as well")
    parser.add_argument("--batch", default="1,4,8", help="max_num_seqs of each cell")
    parser.add_argument("--blocks", type=int, default=72, help="of the KV cache")
    parser.add_argument("--scripts", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=12, help="of a script")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    check_target(args.out)
    cells = []
    for drafts in [None, *([args.draft] if args.draft else [])]:
        for batch in map(int, args.batch.split(",")):
            cells.append(measure(args, batch, drafts))
            ratio = cells[-1]["sync_over_async"]
            print(
                f"{cells[-1]['drafts']}, batch {batch}: {cells[-1]['tokens']} tokens, "
                f"{cells[-1]['differing']} streams differ, preemptions "
                f"{cells[-1]['preemptions']}, sync over async {ratio['median']:.3f} "
                f"({ratio['low']:.3f} to {ratio['high']:.3f})",
                flush=True,
            )
            command = command_line("python", "-m", "profiles.async_steps")
            write_json(args.out, {"environment": describe(command), "cells": cells})
    return 1 if any(cell["differing"] for cell in cells) else 0


if __name__ == "__main__":
    sys.exit(main())
