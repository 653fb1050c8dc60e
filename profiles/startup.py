"""Start-up on this machine: cold and warm seconds of the default table, and its peak memory.

Every start is a process of its own, timed from before the process exists until it can serve. The
cold one has an empty cache folder, so that the kernels and every compiled piece are built; the warm
ones find what it left. Run with nothing else running:

    python -m profiles.startup --out profiles/results/startup.json
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from graphengine import LLM, SamplingParams
from graphengine.bench.environment import command_line, describe
from graphengine.bench.results_file import check_target, write_json
from graphengine.kv.cache import block_bytes

CACHE_VARIABLE = "GRAPHENGINE_CACHE_DIR"
COLD_LIMIT, WARM_LIMIT = 90.0, 20.0  # seconds
MEMORY_LIMIT = 1.5 * 2**30  # bytes beyond weights and KV cache
PROMPT = "Write one sentence about the number {}."


def child(args: argparse.Namespace) -> dict[str, Any]:
    """Start the engine and serve one batch; called in a fresh process."""
    imported = time.monotonic()
    with LLM(
        args.model, dtype=args.dtype, max_num_seqs=args.max_num_seqs, speculative=args.speculate
    ) as llm:
        ready = time.monotonic()
        peak_ready = peak_bytes()
        runner = llm.engine.runner
        prompts = [
            llm.chat_prompt([{"role": "user", "content": PROMPT.format(number)}])
            for number in range(args.max_num_seqs)
        ]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=32))
        served = time.monotonic()
        peak_served = peak_bytes()
        resolved, stats = llm.engine.resolved, llm.stats()
        block = block_bytes(resolved.model, resolved.dtype, resolved.sizes.block_size)
        return {
            "imports_seconds": imported - args.child,
            "phase_seconds": dict(llm.engine.start_times.seconds),
            "phases_cached": dict(llm.engine.start_times.cached),
            "ready_seconds": ready - args.child,
            "first_batch_seconds": served - ready,
            "first_batch_tokens": sum(len(one.outputs[0].token_ids) for one in outputs),
            "num_cells": len(resolved.table),
            "draft_lengths": list(resolved.table.draft_lengths),
            "graph": runner.manager.kind,
            "compile_events": stats.compile_events,
            "compile_events_after_warmup": stats.compile_events_after_warmup,
            "peak_bytes": {"ready": peak_ready, "served": peak_served},
            "weight_bytes": runner.decoder.weights.num_bytes,
            "kv_bytes": resolved.num_blocks * block,
        }


def peak_bytes() -> int:
    """Most memory that this program has had resident.

    Not `ru_maxrss` where there is /proc: that may be the peak of the process that started this one.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def start(kind: str, folder: str, arguments: Sequence[str]) -> dict[str, Any]:
    """One start in a process of its own, with its caches below `folder`."""
    command = [sys.executable, "-m", "profiles.startup", *arguments]
    done = subprocess.run(
        [*command, "--child", repr(time.monotonic())],
        env={**os.environ, CACHE_VARIABLE: folder},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return {"start": kind, **json.loads(done.stdout)}


def beyond(one: dict[str, Any]) -> int:
    """Peak bytes beyond weights and KV cache, whose pages are all written at start (zeroed)."""
    peak: int = max(one["peak_bytes"].values())
    return peak - int(one["weight_bytes"]) - int(one["kv_bytes"])


def summarise(starts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures that have limits, worst case over the starts but for the warm median."""
    warm = [one["ready_seconds"] for one in starts if one["start"] == "warm"]
    cold = max(one["ready_seconds"] for one in starts if one["start"] == "cold")
    most = max(map(beyond, starts))
    return {
        "cold_seconds": cold,
        "cold_limit": COLD_LIMIT,
        "warm_seconds_median": median(warm),
        "warm_seconds_worst": max(warm),
        "warm_limit": WARM_LIMIT,
        "bytes_beyond_weights_and_kv": most,
        "bytes_limit": int(MEMORY_LIMIT),
        "within_limits": cold <= COLD_LIMIT and max(warm) <= WARM_LIMIT and most <= MEMORY_LIMIT,
    }


def line(one: dict[str, Any]) -> str:
    """A start in the table's columns, then its phases."""
    phases = {"imports": one["imports_seconds"], **one["phase_seconds"]}
    peak = max(one["peak_bytes"].values())
    return (
        f"| {one['start']} | {one['ready_seconds']:.1f} | {one['num_cells']} "
        f"| {one['compile_events']} | {_mib(peak)} | {_mib(one['weight_bytes'] + one['kv_bytes'])} "
        f"| {_mib(beyond(one))} | "
        + ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items())
        + " |"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--speculate", default="ngram")
    parser.add_argument("--rounds", type=int, default=3, help="warm starts, at least one")
    parser.add_argument("--out", type=Path, help="write everything measured to this JSON file")
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)  # when it was started
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    return args


def main() -> int:
    args = parse()
    if args.child is not None:
        print(json.dumps(child(args)))
        return 0
    if args.out is not None:
        check_target(args.out)
    columns = "ready, s|cells|compile events|peak, MiB|weights + KV, MiB|beyond, MiB|phases, s"
    print(f"| start | {columns.replace('|', ' | ')} |\n{'|---' * 8}|")
    starts = []
    with tempfile.TemporaryDirectory(prefix="graphengine-startup-") as folder:
        for kind in ("cold", *["warm"] * args.rounds):
            starts.append(start(kind, folder, sys.argv[1:]))
            print(line(starts[-1]), flush=True)
    summary = summarise(starts)
    print(
        f"cold {summary['cold_seconds']:.1f} s (limit {COLD_LIMIT:.0f}), "
        f"warm {summary['warm_seconds_median']:.1f} s, worst {summary['warm_seconds_worst']:.1f} "
        f"(limit {WARM_LIMIT:.0f}), beyond weights and KV "
        f"{_mib(summary['bytes_beyond_weights_and_kv'])} MiB (limit {_mib(int(MEMORY_LIMIT))})"
    )
    if args.out is not None:
        about = describe(command_line("python", "-m", "profiles.startup"))
        write_json(args.out, {**about, "summary": summary, "starts": starts})
    return 0 if summary["within_limits"] else 1


if __name__ == "__main__":
    sys.exit(main())
