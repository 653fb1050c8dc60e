"""`graphengine demo`: real prompts answered twice by one engine, speculation off and on.

Owns what is shown and the verdict. Each prompt's two runs follow each other directly and who goes
first alternates, so that noise hits both alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from graphengine.bench.measure import OWN
from graphengine.bench.pairs import Pair, PairRunner
from graphengine.bench.report import rate_text
from graphengine.bench.workloads import Prompt, load_workloads
from graphengine.cli import drafts
from graphengine.cli.console import has_colour, note, stdout
from graphengine.cli.options import EngineOptions, Model, command, open_engine
from graphengine.demo import PROMPTS_FILE
from graphengine.engine import Engine
from graphengine.models.locate import DEMO_MODEL


@command
def demo(
    *,
    model: Model = DEMO_MODEL,
    rounds: Annotated[int, typer.Option(help="Pairs of each prompt.", min=1)] = 3,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", min=2)] = 128,
    options: EngineOptions,
) -> None:
    """Answer the demo's prompts with speculation off and on, and compare.

    What is on is --speculate's or GRAPHENGINE_SPECULATE's proposer, n-gram where none is named.
    """
    prompts = [prompt for group in load_workloads(PROMPTS_FILE).values() for prompt in group]
    engine = open_engine(model, options.paired_config())
    console = stdout()
    try:
        _print_start(console, engine)
        if has_colour(console):
            print(drafts.legend(colour=True))
        runner = PairRunner(engine, max_tokens=max_tokens)
        runner.warm_up(prompts[0])
        pairs = [_answer(console, runner, prompt, rounds) for prompt in prompts]
        _print_table(console, pairs)
        _print_steps(console, engine)
    finally:
        engine.close()
    _verdict(console, pairs)


def _answer(console: Console, runner: PairRunner, prompt: Prompt, rounds: int) -> list[Pair]:
    """Run a prompt's pairs and print its answer once."""
    engine = runner.engine
    assert engine.tokenizer is not None, "the warm-up encoded a prompt with it"
    console.print(f"\n[bold]{escape(prompt.id)}[/bold]  {escape(_excerpt(prompt.text))}")
    pairs = [runner.run(prompt.kind, [prompt], k=OWN, round=number) for number in range(rounds)]
    run = pairs[0].on
    if has_colour(console):
        print(drafts.paint(engine.tokenizer, run.token_ids[0], run.token_origins[0]))
    else:
        print(engine.tokenizer.decode(run.token_ids[0]))
    return pairs


def _excerpt(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 100 else line[:97] + "..."


def _print_start(console: Console, engine: Engine) -> None:
    stats = engine.stats()
    console.print(f"start: {engine.start_times}")
    console.print(
        f"{len(stats.capture_seconds)} cells captured in {sum(stats.capture_seconds.values()):.2f} "
        f"s, graph kind {engine.runner.manager.kind}"
    )


def _print_table(console: Console, pairs: Sequence[Sequence[Pair]]) -> None:
    table = Table(title="decode tokens/s, speculation off and on")
    table.add_column("prompt")
    for name in ("tokens", "off", "on", "on/off", "accepted", "tokens a step", "identical"):
        table.add_column(name, justify="right")
    for group in pairs:
        ratio, on = _ratio(group), group[0].on
        table.add_row(
            group[0].prompt_ids[0],
            str(on.num_tokens),
            rate_text(median(pair.off.rate for pair in group)),
            rate_text(median(pair.on.rate for pair in group)),
            "-" if ratio is None else f"{ratio:.2f}x",
            f"{on.acceptance_rate:.0%}",
            f"{on.mean_acceptance_length:.2f}",
            "yes" if all(pair.difference is None for pair in group) else "NO",
        )
    console.print()
    console.print(table)


def _ratio(group: Sequence[Pair]) -> float | None:
    """Median of a prompt's paired ratios; None where its answers are too short to time."""
    ratios = [pair.ratio for pair in group if pair.ratio is not None]
    return median(ratios) if ratios else None


def _print_steps(console: Console, engine: Engine) -> None:
    stats = engine.stats()
    console.print(
        f"{stats.num_steps} decode steps, {sum(stats.replays.values())} replays of captured cells, "
        f"compile events after warm-up: {stats.compile_events_after_warmup}"
    )


def _verdict(console: Console, pairs: Sequence[Sequence[Pair]]) -> None:
    flat = [pair for group in pairs for pair in group]
    differing = [pair for pair in flat if pair.difference is not None]
    if differing:
        note(f"DIFFERENT: {len(differing)} of {len(flat)} pairs; {differing[0].difference}")
        raise typer.Exit(1)
    num_tokens = sum(pair.on.num_tokens for pair in flat)
    ratios = [ratio for ratio in map(_ratio, pairs) if ratio is not None]
    speed = f"; median speed-up {median(ratios):.2f}x" if ratios else ""
    console.print(
        f"[bold]identical:[/bold] {len(pairs)} answers, {len(flat)} pairs, {num_tokens} tokens, "
        f"not one differs between off and on{speed}"
    )
