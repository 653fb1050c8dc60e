"""What sampling costs: steps of the same batch, drafts and context, greedy and sampled, in turns.

Every kind of step has requests of its own, with the same prompts: real text, whose next tokens are
the drafts. A turn times one replay of each kind, in random order, and gives one ratio to its greedy
step. What the host does with a step's outputs is not in it. Run with nothing else running:

    python -m profiles.sampling_cost --out profiles/results/sampling_cost.json
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, Final

from capture.config import CaptureConfig
from graphengine.bench.environment import command_line, describe, describe_engine
from graphengine.bench.ratios import median_interval
from graphengine.bench.results_file import check_target, write_json
from graphengine.bench.steps import held
from graphengine.bench.workloads import load_workloads
from graphengine.config import CacheConfig, EngineConfig
from graphengine.engine import Engine
from graphengine.sampling.params import SamplingParams
from graphengine.speculative_config import SpeculativeConfig
from proposers.base import Draft

PROMPTS = Path(__file__).parent / "prompts" / "bench.json"
CONTEXT = 100  # tokens before the step, each request
GREEDY = "greedy"
EVERYTHING: Final = MappingProxyType(
    {
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 50,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.2,
    }
)
KINDS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        GREEDY: {},
        "sampled, neutral": {"temperature": 1.0},
        "everything on": EVERYTHING,
        "everything on, logprobs": {**EVERYTHING, "logprobs": 5},
    }
)
LIMITS: Final = MappingProxyType({"sampled, neutral": 1.15, "everything on": 1.4})


def open_engine(model: str, batch_sizes: Sequence[int], k: int) -> Engine:
    """An engine with room for all kinds at once, and the cells of their steps alone."""
    num_requests = max(batch_sizes) * len(KINDS)
    config = EngineConfig(
        max_model_len=2 * (CONTEXT + k),
        max_num_seqs=num_requests,
        max_num_batched_tokens=num_requests * (CONTEXT + k + 1),  # all are prefilled in one step
        speculative=SpeculativeConfig("ngram", max_draft_tokens=k, adaptive=False),
        capture=CaptureConfig(num_reqs=tuple(batch_sizes), draft_lengths=(0, k)),
        cache=CacheConfig(enable_prefix_caching=False),  # no kind reads another's blocks
    )
    return Engine(model, config)


def texts(engine: Engine, count: int, num_tokens: int) -> list[list[int]]:
    """The first tokens of `count` different texts, of each workload in turn."""
    assert engine.tokenizer is not None, "the prompts are text"
    groups = [
        [engine.tokenizer.encode(prompt.text)[:num_tokens] for prompt in group]
        for group in load_workloads(PROMPTS).values()
    ]
    ranked = [(place, ids) for group in groups for place, ids in enumerate(group)]
    ranked.sort(key=lambda one: one[0])
    long = [ids for _, ids in ranked if len(ids) == num_tokens]
    if len(long) < count:
        raise ValueError(
            f"{PROMPTS.name} has {len(long)} texts of {num_tokens} tokens, not {count}"
        )
    return long[:count]


def time_kinds(engine: Engine, batch_size: int, k: int, turns: int) -> dict[str, list[float]]:
    """Seconds of each kind's step by turn; the first turn is a warm-up and left out."""
    rows = texts(engine, batch_size, CONTEXT + k)
    draft = Draft.from_rows([ids[CONTEXT:] for ids in rows], k)
    prompts = [ids[:CONTEXT] for ids in rows] * len(KINDS)
    params = [
        SamplingParams(max_tokens=k + 2, ignore_eos=True, seed=seed, **fields)
        for fields in KINDS.values()
        for seed in range(batch_size)
    ]
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    order, draw = list(KINDS), random.Random(0)
    with held(engine, prompts, params, k) as requests:
        batches = {
            kind: requests[place * batch_size : (place + 1) * batch_size]
            for place, kind in enumerate(KINDS)
        }
        for turn in range(turns + 1):
            draw.shuffle(order)
            for kind in order:
                for request in batches[kind]:  # nothing is committed: every step is the same
                    engine.state.follow(request)
                start = time.perf_counter()
                engine.runner.verify(batches[kind], draft).packed()
                took = time.perf_counter() - start
                if turn > 0:
                    seconds[kind].append(took)
    return seconds


def summarise(seconds: Mapping[str, Sequence[float]], batch_size: int) -> list[dict[str, Any]]:
    """One row a kind: its median step, and its ratio to the greedy step of the same turn."""
    rows = []
    for kind, values in seconds.items():
        ratios = [one / base for one, base in zip(values, seconds[GREEDY], strict=True)]
        interval, limit = median_interval(ratios), LIMITS.get(kind)
        rows.append(
            {
                "batch_size": batch_size,
                "kind": kind,
                "seconds": median(values),
                "ratio": asdict(interval),
                "limit": limit,
                "within_limit": None if limit is None else interval.median <= limit,
            }
        )
    return rows


def line(row: dict[str, Any]) -> str:
    """A row of the printed table."""
    ratio, limit = row["ratio"], "" if row["limit"] is None else f"{row['limit']:.2f}"
    return (
        f"| {row['batch_size']} | {row['kind']} | {row['seconds'] * 1e3:.2f} "
        f"| {ratio['median']:.3f} | {ratio['low']:.3f} to {ratio['high']:.3f} | {limit} |"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, help="write everything measured to this JSON file")
    parser.add_argument("--batch", default="1,8", help="requests in a step, comma-separated")
    parser.add_argument("--k", type=int, default=3, help="drafts of each request, at least 1")
    parser.add_argument("--turns", type=int, default=300, help="replays of each kind, at least 1")
    args = parser.parse_args()
    args.batch = [int(part) for part in args.batch.split(",")]
    if min(*args.batch, args.k, args.turns) < 1:
        parser.error("--batch, --k and --turns must be at least 1")
    return args


def main() -> int:
    args = parse()
    if args.out is not None:
        check_target(args.out)
    engine = open_engine(args.model, args.batch, args.k)
    print(
        "| batch | step | ms | ratio to greedy | 95 % interval | limit |\n|---|---|---|---|---|---|"
    )
    rows: list[dict[str, Any]] = []
    times = []
    for batch_size in args.batch:
        seconds = time_kinds(engine, batch_size, args.k, args.turns)
        times.append({"batch_size": batch_size, "seconds": seconds})
        rows += summarise(seconds, batch_size)
        print("\n".join(line(row) for row in rows[-len(KINDS) :]), flush=True)
    if args.out is not None:
        report = {
            **describe(command_line("python", "-m", "profiles.sampling_cost")),
            "engine": describe_engine(engine),
            "k": args.k,
            "context": CONTEXT,
            "kinds": {kind: dict(fields) for kind, fields in KINDS.items()},
            "steps": rows,
            "turns": times,
        }
        write_json(args.out, report)
    engine.close()
    return 0 if all(row["within_limit"] in (None, True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
