"""Same seed, same stream, on a real model: 200 requests with sampling parameters of every kind.

A reference run decodes plainly, without speculation. Then cells of proposer, draft length and batch
size serve the same requests with joins and leaves, aborts and, where the pool is small, preemption.
Ids, text and finish reason of every answer must be the reference's (of an aborted one, ids that are
its beginning). Writes JSON after every cell and goes on where a run before has stopped.

    python -m profiles.sampled --out profiles/results/sampled.json [--cells 1,4]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from graphengine.bench.environment import command_line, commit, describe
from graphengine.bench.pairs import parting
from graphengine.bench.results_file import check_target, write_json
from graphengine.bench.workloads import encode, load_workloads
from graphengine.config import CacheConfig, EngineConfig
from graphengine.engine import Engine
from graphengine.request import answer_id
from graphengine.sampling.params import SamplingParams
from graphengine.speculative_config import SpeculativeConfig
from profiles.random_params import Favour, random_params
from proposers.base import Proposer
from proposers.mock import JunkProposer, OracleProposer, RaggedProposer

PROMPTS = Path(__file__).parent / "prompts" / "identity.json"
NUM_REQUESTS = 200
MAX_TOKENS = 48
MAX_MODEL_LEN = 1024
SMALL = (4, 170)  # tokens a block, and blocks, of a pool in which requests must yield
ROOMY = (16, None)
# By answer: token ids, text, finish reason.
Answers = dict[str, tuple[list[int], str, str | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request, when it joins and after how many steps from then, if ever, it is aborted."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    arrives: int
    aborts: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """How the requests are served. k = 0: speculation is off."""

    proposer: str
    max_draft_tokens: int
    max_num_seqs: int
    pool: tuple[int, int | None]  # SMALL or ROOMY; None: blocks for all


DRAFT = "smollm2-135m-eagle3"
REFERENCE = Cell(proposer="off", max_draft_tokens=0, max_num_seqs=8, pool=ROOMY)
CELLS = (
    Cell(proposer="ngram", max_draft_tokens=6, max_num_seqs=16, pool=ROOMY),
    Cell(proposer="oracle", max_draft_tokens=3, max_num_seqs=16, pool=SMALL),
    Cell(proposer="off", max_draft_tokens=0, max_num_seqs=5, pool=SMALL),
    Cell(proposer="ragged", max_draft_tokens=6, max_num_seqs=3, pool=ROOMY),
    Cell(proposer="junk", max_draft_tokens=1, max_num_seqs=8, pool=SMALL),
    Cell(proposer="ngram", max_draft_tokens=3, max_num_seqs=1, pool=ROOMY),
    Cell(proposer="ragged", max_draft_tokens=3, max_num_seqs=16, pool=SMALL),
    Cell(proposer="oracle", max_draft_tokens=6, max_num_seqs=1, pool=ROOMY),
    Cell(proposer="ngram", max_draft_tokens=1, max_num_seqs=12, pool=SMALL),
    Cell(proposer="junk", max_draft_tokens=6, max_num_seqs=2, pool=SMALL),
    Cell(proposer="suffix", max_draft_tokens=6, max_num_seqs=8, pool=ROOMY),
    Cell(proposer="eagle", max_draft_tokens=3, max_num_seqs=16, pool=SMALL),
    Cell(proposer="eagle coupled", max_draft_tokens=6, max_num_seqs=3, pool=ROOMY),
    Cell(proposer="eagle override", max_draft_tokens=3, max_num_seqs=8, pool=SMALL),
)


def make_jobs(engine: Engine, seed: int = 0) -> list[Job]:
    """The requests, all drawn from one seed."""
    draw = random.Random(seed)
    prompts = [prompt for group in load_workloads(PROMPTS).values() for prompt in group]
    jobs, now = [], 0
    for index in range(NUM_REQUESTS):
        prompt = encode(engine.tokenizer, prompts[index % len(prompts)])
        now += draw.choice((0, 0, 1, 4))
        jobs.append(
            Job(
                request_id=f"r{index}",
                prompt=prompt[-200:],
                params=make_params(draw, engine.resolved.model.vocab_size),
                arrives=now,
                aborts=draw.randint(1, 30) if draw.random() < 0.1 else None,
            )
        )
    return jobs


def make_params(draw: random.Random, vocab_size: int) -> SamplingParams:
    params = random_params(draw, vocab_size, MAX_TOKENS, has_text=True)
    has_processors = draw.random() < 0.015
    return replace(params, logits_processors=(Favour(4.0),)) if has_processors else params


def speculation(cell: Cell, draft: str) -> SpeculativeConfig | str:
    """The configuration of a cell; scripted proposers are put in its place."""
    if not cell.max_draft_tokens:
        return "off"
    name, _, how = cell.proposer.partition(" ")
    fields: dict[str, Any] = {"max_draft_tokens": cell.max_draft_tokens, "adaptive": False}
    if name == "eagle":
        fields |= {"model": draft, "override": "suffix" if how == "override" else None}
        fields["draft_sampling"] = "coupled" if how == "coupled" else "greedy"
    method = name if name in ("ngram", "suffix", "eagle") else "mock-empty"
    return SpeculativeConfig(method, **fields)


def open_engine(
    cell: Cell, model: str, proposer: Proposer | None = None, draft: str = DRAFT
) -> Engine:
    block_size, num_blocks = cell.pool
    config = EngineConfig(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=cell.max_num_seqs,
        speculative=speculation(cell, draft),
        logits_processors=True,
        cache=CacheConfig(block_size=block_size, num_blocks=num_blocks),
    )
    return Engine(model, config, proposer=proposer)


def make_proposer(cell: Cell, jobs: Sequence[Job], reference: Answers, vocab_size: int) -> Any:
    """The scripted proposer of a cell; None: the configured one."""
    records = {
        name: [*job.prompt, *reference[name][0]] for job in jobs for name in answer_names(job)
    }
    kinds: dict[str, type] = {
        "oracle": OracleProposer,
        "junk": JunkProposer,
        "ragged": RaggedProposer,
    }
    kind = kinds.get(cell.proposer)
    return None if kind is None else kind(vocab_size=vocab_size, records=records)


def answer_names(job: Job) -> list[str]:
    return [answer_id(job.request_id, choice) for choice in range(job.params.n)]


def serve(engine: Engine, jobs: Sequence[Job], *, aborts: bool) -> Answers:
    """Every request to its end."""
    answers: Answers = {}
    step, waiting = 0, list(jobs)
    due = {job.request_id: job.arrives + job.aborts for job in jobs if job.aborts is not None}
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0].arrives <= step:
            job = waiting.pop(0)
            engine.add_request(job.request_id, job.prompt, job.params)
        for request_id in [name for name, when in due.items() if when <= step] if aborts else ():
            engine.abort(request_id)
            del due[request_id]
        for output in engine.step():
            for one in output.outputs if output.finished else ():
                name = answer_id(output.request_id, one.index)
                answers[name] = (one.token_ids, one.text, one.finish_reason)
        step += 1
    return answers


def compare(reference: Answers, answers: Answers, jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Answers that are not the reference's, with the position where they part."""
    different = []
    for name in [name for job in jobs for name in answer_names(job)]:
        (ids, text, reason), (got, got_text, got_reason) = reference[name], answers[name]
        position = parting(ids[: len(got)] if got_reason == "abort" else ids, got)
        same_end = got_reason == "abort" or (text, reason) == (got_text, got_reason)
        if position is not None or not same_end:
            different.append({"request": name, "position": position, "reason": got_reason})
    return different


def run_cell(
    cell: Cell, jobs: Sequence[Job], reference: Answers, model: str, draft: str
) -> dict[str, Any]:
    vocab_size = max(max(job.prompt) for job in jobs) + 1
    engine = open_engine(cell, model, make_proposer(cell, jobs, reference, vocab_size), draft)
    start = time.perf_counter()
    answers = serve(engine, jobs, aborts=True)
    seconds, stats = time.perf_counter() - start, engine.stats()
    engine.close()
    return {
        "cell": asdict(cell),
        "commit": commit(),
        "different": compare(reference, answers, jobs),
        "num_answers": len(answers),
        "num_tokens": sum(len(ids) for ids, _, _ in answers.values()),
        "seconds": seconds,
        "num_steps": stats.num_steps,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "num_preemptions": stats.num_preemptions,
        "replays": {
            tier: sum(n for name, n in stats.replays.items() if name.endswith(tier))
            for tier in ("greedy", "sampled", "logprobs", "custom")
        },
        "compile_events_after_warmup": stats.compile_events_after_warmup,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft", default=DRAFT, help="EAGLE checkpoint for the model")
    parser.add_argument("--out", type=Path, default=Path("profiles/results/sampled.json"))
    parser.add_argument("--cells", help="only these, by number, comma-separated; default: all")
    args = parser.parse_args()
    numbers = [int(part) for part in args.cells.split(",")] if args.cells else None
    check_target(args.out)
    engine = open_engine(REFERENCE, args.model)
    jobs = make_jobs(engine)
    report: dict[str, Any]
    if args.out.is_file():
        report = json.loads(args.out.read_text(encoding="utf-8"))
    else:
        report = {"run": describe(command_line("python", "-m", "profiles.sampled")), "cells": []}
        report["reference"] = serve(engine, jobs, aborts=False)
        write_json(args.out, report, indent=None)
    engine.close()
    reference: Answers = {name: tuple(one) for name, one in report["reference"].items()}
    done = [Cell(**{**row["cell"], "pool": tuple(row["cell"]["pool"])}) for row in report["cells"]]
    for number, cell in enumerate(CELLS, start=1):
        if cell in done or (numbers is not None and number not in numbers):
            continue
        row = run_cell(cell, jobs, reference, args.model, args.draft)
        report["cells"].append(row)
        write_json(args.out, report, indent=None)
        print(f"[{number}/{len(CELLS)}] {json.dumps(row)}", flush=True)
    differing = sum(len(row["different"]) for row in report["cells"])
    tokens = sum(row["num_tokens"] for row in report["cells"])
    print(f"{len(report['cells'])} of {len(CELLS)} cells, {tokens} tokens, {differing} differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
