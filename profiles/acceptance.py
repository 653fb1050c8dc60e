"""Acceptance of proposers on the real model: rate, by place, and mean acceptance length.

Serves frozen prompts, held out from every training, through each proposer, greedy and at
temperature 0.7 with fixed seeds, and writes counts as JSON after every cell. Also holds every
stream to the one of speculation off, so that no figure is of another text.

    python -m profiles.acceptance --out profiles/results/acceptance.json [--model M --draft PATH]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from graphengine import LLM, SamplingParams, SpeculativeConfig
from graphengine.bench.acceptance import Acceptance, measure_acceptance
from graphengine.bench.environment import command_line, describe
from graphengine.bench.results_file import check_target, write_json
from graphengine.bench.workloads import encode, load_all
from graphengine.models.locate import DEMO_MODEL

FOLDER = Path(__file__).parent / "prompts"
FILES = (FOLDER / "acceptance.json", FOLDER / "bench.json")
WORKLOADS: Final = ("chat", "copy_edit", "code_continuation")
TEMPERATURES: Final = (0.0, 0.7)
MAX_TOKENS: Final = 128


def proposers(draft: str) -> dict[str, SpeculativeConfig]:
    """What drafts, by the name of its row.

    Args:
        draft: EAGLE checkpoint for the model.
    """
    eagle: dict[str, Any] = {"model": draft, "max_draft_tokens": 3}
    return {
        "ngram k=6": SpeculativeConfig("ngram", max_draft_tokens=6, adaptive=False),
        "suffix k=6": SpeculativeConfig(
            "suffix", max_draft_tokens=6, shared_tree_tokens=0, adaptive=False
        ),
        "eagle k=3": SpeculativeConfig("eagle", **eagle, adaptive=False),
        "eagle k=3 coupled": SpeculativeConfig(
            "eagle", draft_sampling="coupled", **eagle, adaptive=False
        ),
        "eagle k=3 ngram override": SpeculativeConfig(
            "eagle", override="ngram", **eagle, adaptive=False
        ),
    }


def measure(
    model: str, speculative: SpeculativeConfig | None, max_tokens: int
) -> Iterator[tuple[str, float, Acceptance, list[list[int]]]]:
    """Serve every workload at every temperature; gives counts, and the tokens of every answer."""
    workloads = load_all(FILES)
    with LLM(model, max_num_seqs=8, max_model_len=2048, speculative=speculative or "off") as llm:
        for workload in WORKLOADS:
            prompts = [encode(llm.tokenizer, prompt) for prompt in workloads[workload]]
            for temperature in TEMPERATURES:
                params = [
                    SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
                    for seed in range(len(prompts))
                ]
                found, streams = measure_acceptance(llm.engine, prompts, params, batch_size=8)
                yield workload, temperature, found, streams


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--draft", default="smollm2-135m-eagle3", help="EAGLE checkpoint")
    parser.add_argument("--only", help="rows of these proposers, comma-separated")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    args = parser.parse_args()
    check_target(args.out)
    report: dict[str, Any] = {
        "about": describe(command_line("profiles.acceptance")),
        "max_tokens": args.max_tokens,
        "cells": [],
    }
    chosen = proposers(args.draft)
    if args.only:
        chosen = {name: chosen[name] for name in args.only.split(",")}
    off = {
        (workload, temperature): streams
        for workload, temperature, _, streams in measure(args.model, None, args.max_tokens)
    }
    num_different = 0
    for name, speculative in chosen.items():
        cells = measure(args.model, speculative, args.max_tokens)
        for workload, temperature, found, streams in cells:
            pairs = zip(streams, off[workload, temperature], strict=True)
            different = sum(on != plain for on, plain in pairs)
            num_different += different
            report["cells"].append(
                {
                    "proposer": name,
                    "workload": workload,
                    "temperature": temperature,
                    "num_prompts": len(streams),
                    **asdict(found),
                    "rate": found.rate,
                    "mean_acceptance_length": found.mean_acceptance_length,
                    "conditional": found.conditional,
                    "different_streams": different,
                }
            )
            write_json(args.out, report)
            print(f"{name}, {workload}, T = {temperature}: {found}", flush=True)
    print(f"{num_different} streams differ from those of speculation off")
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
