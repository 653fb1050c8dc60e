"""Rejection mode: chi-square tests of what comes out, against the target's own distribution.

Cells of proposer and temperature serve many short answers to a few fixed prompts through the real
engine, `verification="rejection"`. Request r of cell c has the seed (1000 + c) * 2**32 + r, fixed
in advance. Raw counts, probabilities and every p-value go into the JSON, with Holm's correction
over all tests of all cells but those whose drafts are biased on purpose, which must be caught. It
is written after every thousand requests, and a run goes on there. See docs/rejection.md.

    python -m profiles.rejection --out profiles/results/rejection.json [--cells 1,4] [--tokens N]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graphengine.bench.distributions import holm
from graphengine.bench.environment import command_line, commit, describe
from graphengine.bench.results_file import check_target, write_json
from graphengine.config import EngineConfig
from graphengine.engine import Engine
from graphengine.sampling.params import SamplingParams
from profiles.rejection_drafts import (
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    MODEL_DRAFTS,
    biased_proposer,
    speculation,
)
from profiles.target_law import Table, Target, count_stream, make_tables, run_tests
from profiles.tiny_model import write_checkpoint

TINY = "tiny random Llama, 16 tokens"
SMOLLM2 = "smollm2-135m"
# Prompts that repeat, so that n-gram drafts from the first token on. Of the tiny model: one whose
# repetition it finds likely, and one whose repetition it does not.
PROMPTS = ([2, 0, 9, 2, 0, 9, 2], [1, 2, 4, 8, 1, 2, 4, 8, 1, 2])
# 17 tokens: a cached block of 16, and the one that every decode starts with.
TEXT = "Tom has a red car and a blue car. Ann has a red car and a"
ALLOWED = (0, 2, 3, 5, 9, 12)  # in cells whose drafts are none of these
CHUNK = 1000  # requests between two writes
FIRST_SEED = 1000 << 32
SEED_RULE = "(1000 + cell) * 2**32 + request; cells from 1, requests from 0, prompts in turn"
LARGEST_P, CAUGHT_P = 0.05, 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What drafts, and how tokens are to be distributed."""

    drafts: str
    temperature: float
    top_p: float = 1.0
    model: str = TINY
    max_tokens: int = 4  # of an answer
    biased: bool = False

    def params(self, seed: int = 0) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            allowed_token_ids=ALLOWED if self.drafts == "disjoint" else None,
            ignore_eos=True,
            seed=seed,
        )


CELLS = (
    *(
        Cell(drafts=drafts, temperature=temperature)
        for drafts in ("ngram", "greedy", "related", "same", "disjoint", "one-hot", "tiny")
        for temperature in (0.5, 1.0, 1.7)
    ),
    *(
        Cell(drafts=drafts, temperature=1.0, top_p=0.9)
        for drafts in ("ngram", "related", "same", "removed")
    ),
    Cell(drafts="inverse", temperature=1.0),
    Cell(drafts="reused-noise", temperature=1.0, biased=True),
    Cell(drafts="other-q", temperature=1.0, biased=True),
    Cell(drafts="ngram", temperature=1.0, model=SMOLLM2, max_tokens=3),
    *(
        Cell(drafts=drafts, temperature=temperature)
        for drafts in MODEL_DRAFTS
        for temperature in (0.5, 1.0, 1.7)
    ),
)


def new_row(number: int, cell: Cell, num_tokens: int, target: Target) -> dict[str, Any]:
    """A cell before its first request: what will be counted, and what is expected."""
    prompts = list(PROMPTS) if cell.model == TINY else [target.encode(TEXT)]
    num_each = -(-num_tokens // (cell.max_tokens * len(prompts)))
    return {
        "number": number,
        "cell": asdict(cell),
        "commit": commit(),
        "num_requests": num_each * len(prompts),
        "num_done": 0,
        "num_tokens": 0,
        "seconds": 0.0,
        "num_steps": 0,
        "num_draft_tokens": 0,
        "num_accepted_tokens": 0,
        "prompts": [
            {
                "prompt": prompt,
                "tables": [
                    asdict(table) for table in make_tables(target, prompt, cell.params(), num_each)
                ],
            }
            for prompt in prompts
        ],
    }


def run_chunk(row: dict[str, Any], cell: Cell, engine: Engine) -> None:
    """Serve a cell's next thousand requests, and count."""
    tables = [[Table(**table) for table in one["tables"]] for one in row["prompts"]]
    prompts = [one["prompt"] for one in row["prompts"]]
    first, end = row["num_done"], min(row["num_done"] + CHUNK, row["num_requests"])
    before, start = engine.stats(), time.perf_counter()
    streams = serve(engine, cell, row["number"], prompts, range(first, end))
    row["seconds"] += time.perf_counter() - start
    after = engine.stats()
    for name in ("num_steps", "num_draft_tokens", "num_accepted_tokens"):
        row[name] += getattr(after, name) - getattr(before, name)
    for request, stream in streams.items():
        count_stream(tables[request % len(prompts)], stream)
        row["num_tokens"] += len(stream)
    for one, counted in zip(row["prompts"], tables, strict=True):
        one["tables"] = [asdict(table) for table in counted]
    row["num_done"] = end


def serve(
    engine: Engine, cell: Cell, number: int, prompts: Sequence[list[int]], requests: range
) -> dict[int, list[int]]:
    """Answers by request; a new one joins as soon as there is room for it."""
    waiting, streams, unfinished = list(reversed(requests)), {}, 0
    while waiting or engine.has_unfinished_requests():
        while waiting and unfinished < 2 * MAX_NUM_SEQS:
            request = waiting.pop()
            prompt, seed = prompts[request % len(prompts)], FIRST_SEED + (number << 32) + request
            engine.add_request(str(request), prompt, cell.params(seed))
            unfinished += 1
        for output in engine.step():
            if output.finished:
                streams[int(output.request_id)] = output.outputs[0].token_ids
                unfinished -= 1
    return streams


def run_cell(row: dict[str, Any], cell: Cell, target: Target, model: str | Path) -> Iterator[None]:
    """All that is left of a cell; yields wherever it may be cut off."""
    config = EngineConfig(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        speculative=speculation(cell.drafts, target, cell.params(), model),
    )
    engine = Engine(model, config, proposer=biased_proposer(cell.drafts, target, cell.params()))
    while row["num_done"] < row["num_requests"]:
        run_chunk(row, cell, engine)
        yield
    engine.close()
    row["tests"] = [
        {"prompt": index, **test}
        for index, one in enumerate(row["prompts"])
        for test in run_tests([Table(**table) for table in one["tables"]])
    ]


def judge(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Adjust every p of the complete cells: fair ones for all their tests, biased ones each."""
    rows = [row for row in rows if "tests" in row]
    fair = [test for row in rows if not row["cell"]["biased"] for test in row["tests"]]
    families = [fair, *(row["tests"] for row in rows if row["cell"]["biased"])]
    for tests in families:
        for test, adjusted in zip(tests, holm([test["p"] for test in tests]), strict=True):
            test["adjusted"] = adjusted
    least = {row["number"]: min(test["adjusted"] for test in row["tests"]) for row in rows}
    biased = {row["number"] for row in rows if row["cell"]["biased"]}
    return {
        "num_cells": len(rows),
        "num_tests": len(fair),
        "num_below_largest_p": sum(test["p"] < LARGEST_P for test in fair),
        "smallest_p": min((test["p"] for test in fair), default=1.0),
        "smallest_adjusted": min((least[n] for n in least if n not in biased), default=1.0),
        "rejected_cells": [n for n in least if n not in biased and least[n] < LARGEST_P],
        "missed_cells": [n for n in biased if least[n] >= CAUGHT_P],
    }


def line(row: dict[str, Any]) -> str:
    """A cell as a row of the table in docs/rejection.md."""
    cell, first = row["cell"], [test for test in row["tests"] if test["test"] == "first"]
    worst = max(first, key=lambda test: test["tv"] / test["tv_of_noise"])
    figures = [
        row["number"],
        cell["drafts"] + (", SmolLM2" if cell["model"] == SMOLLM2 else ""),
        cell["temperature"],
        cell["top_p"],
        f"{row['num_tokens']:,}",
        f"{100 * row['num_accepted_tokens'] / row['num_draft_tokens']:.2f} %",
        len(row["tests"]),
        f"{min(test['p'] for test in row['tests']):.2g}",
        f"{min(test['adjusted'] for test in row['tests']):.2g}",
        f"{worst['tv']:.4f} ({worst['tv_of_noise']:.4f})",
    ]
    return f"| {' | '.join(map(str, figures))} |"


def open_report(file: Path, num_tokens: int) -> dict[str, Any]:
    """The report to go on with, complete cells of any commit and a begun one of this."""
    if not file.is_file():
        run = describe(command_line("python", "-m", "profiles.rejection"))
        return {"run": run, "seeds": SEED_RULE, "num_tokens": num_tokens, "cells": []}
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if report["num_tokens"] != num_tokens:
        sys.exit(f"{file} holds cells of {report['num_tokens']} tokens; name another file")
    now = commit()
    report["cells"] = [row for row in report["cells"] if "tests" in row or row["commit"] == now]
    return report


def run_cells(report: dict[str, Any], numbers: Sequence[int], out: Path, folder: Path) -> None:
    """Run cells, or what is left of them, in turn; the report is written again and again."""
    models: dict[str, str | Path] = {TINY: write_checkpoint(folder), SMOLLM2: SMOLLM2}
    targets: dict[str, Target] = {}
    for number in numbers:
        cell = CELLS[number - 1]
        row = next((row for row in report["cells"] if row["cell"] == asdict(cell)), None)
        if row is not None and "tests" in row:
            continue
        model = models[cell.model]
        if cell.model not in targets:
            targets[cell.model] = Target(model, MAX_MODEL_LEN)
        if row is None:
            row = new_row(number, cell, report["num_tokens"], targets[cell.model])
            report["cells"].append(row)
        for _ in run_cell(row, cell, targets[cell.model], model):
            write_json(out, report, indent=None)
        report["summary"] = judge(report["cells"])
        write_json(out, report, indent=None)
        print(line(row), flush=True)
    for target in targets.values():
        target.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("profiles/results/rejection.json"))
    parser.add_argument("--cells", help="only these, by number, comma-separated; default: all")
    parser.add_argument("--tokens", type=int, default=100_000, help="of a cell, at least")
    args = parser.parse_args()
    everything = range(1, len(CELLS) + 1)
    chosen = [int(part) for part in args.cells.split(",")] if args.cells else list(everything)
    if not set(chosen) <= set(everything):
        parser.error(f"--cells: there are 1 to {len(CELLS)}")
    check_target(args.out)
    report = open_report(args.out, args.tokens)
    done = {row["number"] for row in report["cells"] if "tests" in row}
    print(f"{len(done & {*chosen})} of {len(chosen)} cells are in {args.out.name} already")
    with tempfile.TemporaryDirectory() as folder:
        run_cells(report, chosen, args.out, Path(folder))
    summary = judge(report["cells"])
    print(json.dumps(summary))
    return 1 if summary["rejected_cells"] or summary["missed_cells"] else 0


if __name__ == "__main__":
    sys.exit(main())
