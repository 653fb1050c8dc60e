"""On/off identity on a real model: speculation must not change one token, in any configuration.

Runs the frozen prompts through cells that cover every pair of (batch size, draft length, graph
kind, chunked prefill, prefix cache), each with speculation off and on, and compares every stream
with one reference run. Writes JSON after every cell, so that a cut-off run loses nothing and a
second call goes on where the first one stopped.

    python -m profiles.identity --out profiles/results/identity.json [--cells 1,4] [--smoke]
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graphengine import LLM, CacheConfig, CaptureConfig, SamplingParams, SpeculativeConfig
from graphengine.bench.environment import command_line, commit, describe
from graphengine.bench.pairs import parting
from graphengine.bench.results_file import check_target, write_json
from graphengine.bench.workloads import Prompt, encode, load_workloads

PROMPTS = Path(__file__).parent / "prompts" / "identity.json"
LEVELS: dict[str, tuple[Any, ...]] = {
    "max_num_seqs": (1, 3, 8, 16),
    "max_draft_tokens": (1, 2, 3, 6),
    "graph": ("tape", "compiled", "eager"),
    "chunked_prefill": (True, False),
    "prefix_caching": (True, False),
}
NUM_SMOKE_CELLS = 4  # the first ones, which between them have every graph kind and setting
CHUNK_BUDGET = 128  # max_num_batched_tokens of cells with chunked prefill, so that prompts split


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One configuration."""

    max_num_seqs: int
    max_draft_tokens: int
    graph: str
    chunked_prefill: bool
    prefix_caching: bool

    def open(self, args: argparse.Namespace) -> LLM:
        return LLM(
            args.model,
            dtype=args.dtype,
            max_num_seqs=self.max_num_seqs,
            max_model_len=args.max_model_len,
            max_num_batched_tokens=CHUNK_BUDGET if self.chunked_prefill else None,
            speculative=speculation(args, self.max_draft_tokens),
            capture=CaptureConfig(graph=self.graph),  # type: ignore[arg-type]
            cache=CacheConfig(
                enable_prefix_caching=self.prefix_caching,
                enable_chunked_prefill=self.chunked_prefill,
            ),
        )


def speculation(args: argparse.Namespace, k: int) -> SpeculativeConfig:
    """What the flags name, with drafts of up to k tokens."""
    return SpeculativeConfig(
        args.proposer,
        model=args.draft_model,
        override=args.override,
        max_draft_tokens=k,
        adaptive=False,
    )


def pairwise_cells(seed: int = 0) -> list[Cell]:
    """A small set of cells in which every pair of levels of two factors occurs (greedy cover)."""
    names = list(LEVELS)
    everything = list(itertools.product(*LEVELS.values()))
    random.Random(seed).shuffle(everything)

    def pairs(levels: Sequence[Any]) -> set[tuple[str, Any, str, Any]]:
        return {
            (names[i], levels[i], names[j], levels[j])
            for i, j in itertools.combinations(range(len(names)), 2)
        }

    missing = set().union(*map(pairs, everything))
    cells: list[Cell] = []
    while missing:
        best = max(everything, key=lambda levels: len(pairs(levels) & missing))
        missing -= pairs(best)
        cells.append(Cell(**dict(zip(names, best, strict=True))))
    return cells


def run_pass(llm: LLM, prompts: Sequence[list[int]], max_tokens: int, limit: int) -> dict[str, Any]:
    """All prompts through one engine, arriving in three waves; streams, seconds and counters."""
    engine = llm.engine
    engine.draft_limit = limit
    engine.reset_prefix_cache()  # both passes start cold
    params = SamplingParams(max_tokens=max_tokens)
    before = llm.stats()
    streams: dict[str, list[int]] = {}
    waves = iter(_waves(len(prompts)))
    start = time.perf_counter()
    for wave in waves:
        for index in wave:
            engine.add_request(f"{limit}-{index}", prompts[index], params)
        for _ in range(20):
            _collect(llm, streams)
    while engine.has_unfinished_requests():
        _collect(llm, streams)
    seconds = time.perf_counter() - start
    after = llm.stats()
    drafted = after.num_draft_tokens - before.num_draft_tokens
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    ordered = [streams[f"{limit}-{index}"] for index in range(len(prompts))]
    return {
        "streams": ordered,
        "seconds": seconds,
        "tokens_per_second": sum(map(len, ordered)) / seconds,
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
        "num_steps": after.num_steps - before.num_steps,
        "padding_rows": after.padding_rows - before.padding_rows,
    }


def _waves(count: int) -> Iterator[range]:
    third = -(-count // 3)
    return (range(first, min(first + third, count)) for first in range(0, count, third))


def _collect(llm: LLM, streams: dict[str, list[int]]) -> None:
    for output in llm.engine.step():
        if output.finished:
            streams[output.request_id] = output.outputs[0].token_ids


def compare(reference: Sequence[list[int]], streams: Sequence[list[int]]) -> list[dict[str, int]]:
    """Where streams differ: prompt, position, and how many tokens are not the reference's."""
    different = []
    for index, (want, got) in enumerate(zip(reference, streams, strict=True)):
        position = parting(want, got)
        if position is not None:
            tokens = max(len(want), len(got)) - position
            different.append({"prompt": index, "position": position, "tokens": tokens})
    return different


def cause(on: dict[str, Any], off: dict[str, Any]) -> str:
    """Why speculation loses in a cell, by its counters; empty where it wins."""
    if on["tokens_per_second"] >= off["tokens_per_second"]:
        return ""
    saved, cost = 1 - on["num_steps"] / off["num_steps"], step_cost(on, off)
    rate = on["num_accepted_tokens"] / max(1, on["num_draft_tokens"])
    drafts = (
        f"{rate:.0%} of {on['num_draft_tokens']} drafts accepted, "
        f"{on['padding_rows'] / on['num_steps']:.1f} padding rows a step"
    )
    if saved <= 0:
        return f"no step saved ({on['num_steps']} against {off['num_steps']}); {drafts}"
    return (
        f"{saved:.0%} of the steps saved, but a step costs {cost:.2f} plain ones, which pays from "
        f"{1 - 1 / cost:.0%} on; {drafts}"
    )


def step_cost(on: dict[str, Any], off: dict[str, Any]) -> float:
    """Seconds of a mean step with speculation on over one with it off, each with its prefills."""
    ratio: float = (on["seconds"] / on["num_steps"]) / (off["seconds"] / off["num_steps"])
    return ratio


def run_cell(cell: Cell, args: argparse.Namespace, prompts: Sequence[Prompt]) -> dict[str, Any]:
    with cell.open(args) as llm:
        room = args.max_model_len - args.max_tokens
        ids = [encode(llm.engine.tokenizer, prompt)[-room:] for prompt in prompts]
        off = run_pass(llm, ids, args.max_tokens, 0)
        on = run_pass(llm, ids, args.max_tokens, cell.max_draft_tokens)
        late = llm.stats().compile_events_after_warmup
    return {"off": off, "on": on, "compile_events_after_warmup": late}


def summarise(cell: Cell, result: dict[str, Any], reference: Sequence[list[int]]) -> dict[str, Any]:
    off, on = result["off"], result["on"]
    figures = ("seconds", "tokens_per_second", "num_draft_tokens", "num_accepted_tokens")
    return {
        "cell": asdict(cell),
        "commit": commit(),
        "differing_off": compare(reference, off["streams"]),
        "differing_on": compare(reference, on["streams"]),
        "num_tokens": sum(map(len, on["streams"])),
        "off": {name: off[name] for name in (*figures, "num_steps")},
        "on": {name: on[name] for name in (*figures, "num_steps", "padding_rows")},
        "ratio": on["tokens_per_second"] / off["tokens_per_second"],
        "step_cost": step_cost(on, off),
        "cause": cause(on, off),
        "compile_events_after_warmup": result["compile_events_after_warmup"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--proposer", default="ngram")
    parser.add_argument("--draft-model", help="checkpoint of a proposer with a model")
    parser.add_argument("--override", help="ngram or suffix")
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=2048, help="longer prompts are cut")
    parser.add_argument("--out", type=Path, default=Path("profiles/results/identity.json"))
    parser.add_argument("--smoke", action="store_true", help="4 cells, 10 prompts, 32 tokens")
    parser.add_argument("--cells", type=_numbers, help="only these, by number; default: all")
    args = parser.parse_args()
    prompts = [p for group in load_workloads(args.prompts).values() for p in group]
    cells = pairwise_cells()
    if args.smoke:
        prompts, cells, args.max_tokens = prompts[::10], cells[:NUM_SMOKE_CELLS], 32
    chosen = args.cells or range(1, len(cells) + 1)
    if not set(chosen) <= set(range(1, len(cells) + 1)):
        parser.error(f"--cells: there are 1 to {len(cells)}")
    check_target(args.out)
    report = _resume(args, cells, prompts)
    done = {json.dumps(row["cell"], sort_keys=True) for row in report["cells"]}
    for number in chosen:
        cell = cells[number - 1]
        if json.dumps(asdict(cell), sort_keys=True) in done:
            continue
        result = run_cell(cell, args, prompts)
        if report["reference"] is None:
            report["reference"] = result["off"]["streams"]  # the first cell's plain decoding
        row = summarise(cell, result, report["reference"])
        report["cells"].append(row)
        report["total"] = total(report["cells"])
        write_json(args.out, report, indent=None)
        print(f"[{number}/{len(cells)}] {_line(row)}", flush=True)
    figures = total(report["cells"])
    print(
        f"{len(report['cells'])} of {len(cells)} cells: {figures['num_tokens']} tokens with "
        f"speculation on compared with the reference, {figures['differing_on']} differ (off: "
        f"{figures['differing_off']}); on/off {figures['lowest_ratio']:.2f} to "
        f"{figures['highest_ratio']:.2f}, compile events after warm-up: {figures['compile_events']}"
    )
    return 1 if figures["differing_on"] or figures["differing_off"] else 0


def total(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures over all cells measured so far, at least one; differences in tokens."""
    ratios = [row["ratio"] for row in rows]

    def differing(side: str) -> int:
        return sum(one["tokens"] for row in rows for one in row[side])

    return {
        "num_tokens": sum(row["num_tokens"] for row in rows),
        "differing_off": differing("differing_off"),
        "differing_on": differing("differing_on"),
        "lowest_ratio": min(ratios),
        "highest_ratio": max(ratios),
        "compile_events": sum(row["compile_events_after_warmup"] for row in rows),
    }


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _resume(args: argparse.Namespace, cells: Sequence[Cell], prompts: Sequence[Prompt]) -> Any:
    texts = json.dumps([asdict(prompt) for prompt in prompts])
    about = {
        "model": args.model,
        "dtype": args.dtype,
        "max_tokens": args.max_tokens,
        "num_prompts": len(prompts),
        "prompts": hashlib.sha256(texts.encode()).hexdigest()[:16],
        "proposer": [list(option) for option in speculation(args, 1).options],
        **({"method": args.proposer} if args.proposer != "ngram" else {}),
        **({"draft_model": args.draft_model} if args.draft_model else {}),
        **({"override": args.override} if args.override else {}),
    }
    if args.out.is_file():
        report = json.loads(args.out.read_text(encoding="utf-8"))
        if report["about"] == about:
            return report
        sys.exit(f"{args.out} holds another run ({report['about']}); name another file")
    return {
        "run": describe(command_line("python", "-m", "profiles.identity")),
        "about": about,
        "num_cells": len(cells),
        "reference": None,
        "cells": [],
    }


def _line(row: dict[str, Any]) -> str:
    cell = ", ".join(f"{name}={value}" for name, value in row["cell"].items())
    differing = len(row["differing_off"]) + len(row["differing_on"])
    return f"{cell}: {differing} differing streams, on/off {row['ratio']:.2f} {row['cause']}"


if __name__ == "__main__":
    sys.exit(main())
