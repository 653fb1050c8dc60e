"""Whole engines: on/off identity of the small model, a table captured, graph against eager."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict

import torch

from capture.config import CaptureConfig
from graphengine.bench.workloads import encode, load_workloads
from graphengine.config import EngineConfig
from graphengine.engine import Engine
from graphengine.speculative_config import SpeculativeConfig
from profiles.gpu_stages.base import TINY, Context, Stage
from profiles.identity import LEVELS, PROMPTS, Cell, compare, run_pass

MAX_TOKENS, MAX_MODEL_LEN = 64, 1024
# Requests, drafts, graph, chunked prefill, prefix cache.
CELLS = (
    (8, 6, "auto", True, True),
    (1, 3, "auto", False, False),
    (3, 2, "eager", True, False),
    (16, 1, "compiled", False, True),
)
# 7 batch sizes, 2 draft lengths, 3 tiers.
LADDER, LENGTHS = (1, 2, 4, 8, 16, 24, 32), (0, 5)


def identity(context: Context) -> None:
    """Frozen prompts with n-grams on and off, in cells of other sizes and launches; AssertionError
    where a token differs.
    """
    model, name = context.small_model()
    context.keep(model=name)
    every = 50 if context.device == "cpu" else 5
    prompts = [one for group in load_workloads(PROMPTS).values() for one in group][::every]
    args = argparse.Namespace(
        model=model, dtype="bfloat16", max_model_len=MAX_MODEL_LEN, proposer="ngram",
        draft_model=None, override=None,
    )  # fmt: skip
    for values in CELLS:
        cell = Cell(**dict(zip(LEVELS, values, strict=True)))
        key = ", ".join(map(str, values))
        if context.has_row(key):
            continue
        with cell.open(args) as llm:
            ids = [
                encode(llm.engine.tokenizer, one)[-MAX_MODEL_LEN + MAX_TOKENS :] for one in prompts
            ]
            off = run_pass(llm, ids, MAX_TOKENS, 0)
            on = run_pass(llm, ids, MAX_TOKENS, cell.max_draft_tokens)
            late = llm.stats().compile_events_after_warmup
        reference = context.result.get("reference")
        if reference is None:
            reference = off["streams"]
            context.keep(reference=reference)
        row = {
            "cell": asdict(cell),
            "differing_off": compare(reference, off["streams"]),
            "differing_on": compare(reference, on["streams"]),
            "num_tokens": sum(map(len, on["streams"])),
            "drafts": on["num_draft_tokens"],
            "accepted": on["num_accepted_tokens"],
            "tokens_per_second": {
                "off": off["tokens_per_second"], "on": on["tokens_per_second"]
            },
            "compile_events_after_warmup": late,
        }  # fmt: skip
        context.row(key, row)
    rows = context.result["rows"].values()
    differing = sum(len(row["differing_off"]) + len(row["differing_on"]) for row in rows)
    assert not differing, f"{differing} streams differ from plain decoding"


def capture(context: Context) -> None:
    """Seconds and bytes of a table of 42 cells, and of the head's graphs behind it."""
    model, name = context.small_model()
    context.keep(model=name)
    cuda = context.device == "cuda"
    for what, path, draft in (
        ("small model", model, None),
        ("tiny target with EAGLE-3", str(TINY / "target"), str(TINY / "eagle3")),
    ):
        if cuda:
            torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved() if cuda else 0
        start = time.perf_counter()
        engine = Engine(
            path,
            EngineConfig(
                device=context.device, dtype="bfloat16", max_model_len=512,
                max_num_seqs=LADDER[-1],
                speculative=SpeculativeConfig(
                    "ngram" if draft is None else "eagle", model=draft,
                    max_draft_tokens=LENGTHS[-1],
                    adaptive=False,
                ),
                capture=CaptureConfig(num_reqs=LADDER, draft_lengths=LENGTHS),
            ),
        )  # fmt: skip
        stats = engine.runner.manager.stats
        row = {
            "start_seconds": time.perf_counter() - start,
            "phases": dict(engine.start_times.seconds),
            "num_cells": len(stats.seconds),
            "capture_seconds": sum(stats.seconds.values()),
            "graph_bytes": sum(stats.num_bytes.values()),
            "buffer_bytes": engine.runner.buffers.num_bytes,
            "reserved_bytes": (torch.cuda.memory_reserved() if cuda else 0) - before,
            "weight_bytes": engine.runner.decoder.weights.num_bytes,
            "attention": engine.capture_report().splitlines()[0],
            "cells": {key: [stats.seconds[key], stats.num_bytes[key]] for key in stats.seconds},
        }
        context.row(what, row)
        engine.close()
        del engine


def graph_vs_eager(context: Context) -> None:
    """The profile of its own name, in a process of its own, over the small model."""
    model, name = context.small_model()
    context.keep(model=name)
    out = context.folder / "graph_vs_eager.data.json"
    command = [
        sys.executable, "-m", "profiles.graph_vs_eager", "--model", model,
        "--device", context.device, "--dtype", "bfloat16", "--batch", "1,8", "--k", "0,5",
        "--out", str(out),
    ]  # fmt: skip
    if context.device == "cpu":
        command += ["--turns", "5", "--steps", "2"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout)
    context.keep(printed=done.stdout[-8000:])
    done.check_returncode()
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    for row in rows:
        context.row(f"{row['batch_size']} x {row['k']}, {row['mode']}", row)


STAGES = (
    Stage(name="identity-small", about="on/off, frozen prompts", seconds=120, run=identity),
    Stage(name="capture", about="seconds and bytes of a table", seconds=90, run=capture),
    Stage(
        name="graph-vs-eager", about="launches, gaps, step times", seconds=120, run=graph_vs_eager
    ),
)
