"""`graphengine bench`: speculation off against on, in pairs; step times; a peer beside it.

Owns the flags and the order of the parts. What is measured and how is `graphengine.bench`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from capture.shapes import DEFAULT_DRAFT_LENGTHS
from graphengine.bench import environment, report
from graphengine.bench.pairs import OWN, DraftLengthChoice, Pair, PairPlan, PairRunner
from graphengine.bench.peer import PEERS, Peer, PeerRound, run_rounds
from graphengine.bench.results_file import check_target, write_json
from graphengine.bench.steps import StepTime, step_times
from graphengine.bench.workloads import Prompt, batches, encode, load_all
from graphengine.cli.console import counting, note, stdout
from graphengine.cli.options import EngineOptions, Model, command, open_engine
from graphengine.config import EngineConfig
from graphengine.demo import PROMPTS_FILE
from graphengine.engine import Engine
from graphengine.models.locate import DEMO_MODEL
from graphengine.speculative_config import SpeculativeConfig

_SHORT, _LONG = 100, 2000  # tokens of context of the step times
_PEER_TOKENS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """Flags of what is measured, and how often."""

    prompts: Annotated[
        list[Path] | None,
        typer.Option("--prompts", help="JSON prompt list; may be repeated. Default: the demo's."),
    ] = None
    workload: Annotated[
        list[str] | None,
        typer.Option("--workload", help="Only this workload; may be repeated."),
    ] = None
    batch: Annotated[
        str, typer.Option("--batch", help="Batch sizes, comma-separated.", metavar="N,...")
    ] = "1"
    k: Annotated[
        str | None,
        typer.Option(
            "--k",
            help="Fixed draft lengths; `adaptive`, the default: what --adaptive says.",
            metavar="K,...",
        ),
    ] = None
    rounds: Annotated[int, typer.Option(help="Pairs of each batch; 0: no pairs.", min=0)] = 3
    half_width: Annotated[
        float | None,
        typer.Option(
            help="End a row's rounds once its 95 % interval is within this share of the median.",
            min=0.0,
        ),
    ] = None
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", min=2)] = 128
    replays: Annotated[
        int, typer.Option(help="Replays of each step time; 0: no step times.", min=0)
    ] = 30
    against: Annotated[
        str | None, typer.Option(help="Also compare plain decoding with: transformers.")
    ] = None
    peer_rounds: Annotated[
        int, typer.Option(help="Turns of each side and batch size of --against.", min=1)
    ] = 5
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write everything measured to this file.")
    ] = None


@command
def bench(*, model: Model = DEMO_MODEL, wanted: BenchOptions, options: EngineOptions) -> None:
    """Measure decode tokens/s with speculation off and on, interleaved in one process.

    What is on is --speculate's or GRAPHENGINE_SPECULATE's proposer, n-gram where none is named.
    `--rounds 0 --replays 0 --against transformers` measures plain decoding beside the peer alone.
    """
    workloads = _select(load_all(wanted.prompts or [PROMPTS_FILE]), wanted.workload)
    sizes = parse_numbers("--batch", wanted.batch, minimum=1)
    config, lengths = bench_config(options.paired_config(), wanted.k, max(sizes))
    _check_early(wanted)
    plan = PairPlan(
        workloads=workloads,
        batch_sizes=sizes,
        draft_lengths=lengths,
        rounds=wanted.rounds,
        max_tokens=wanted.max_tokens,
        half_width=wanted.half_width,
    )
    measured = Measured(pairs=[], steps=[], rounds=[])
    with closing(open_engine(model, config)) as engine:
        _measure(measured, engine, plan, wanted.replays)
        if wanted.against is not None:
            peer = PeerPlan(wanted.against, model, wanted.peer_rounds)
            _against(measured, engine, plan, peer)
        about = environment.describe(environment.command_line("graphengine"))
        about["engine"] = environment.describe_engine(engine)
    if wanted.json_file is not None:
        _write(wanted.json_file, about, measured)
    _check_identical(measured.pairs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Everything that a run of `bench` measured, so far."""

    pairs: list[Pair]
    steps: list[StepTime]
    rounds: list[PeerRound]


@dataclass(frozen=True, slots=True)
class PeerPlan:
    """Whom to compare plain decoding with."""

    peer: str
    model: str
    rounds: int


def _measure(measured: Measured, engine: Engine, plan: PairPlan, replays: int) -> None:
    """Pairs and step times, each table printed as soon as it is known."""
    console = stdout()
    if plan.rounds:
        measured.pairs.extend(_pairs(engine, plan))
        console.print(report.pair_table(report.summarise(measured.pairs)))
    if replays:
        measured.steps.extend(_steps(engine, plan, replays))
        console.print(report.step_table(measured.steps))


def bench_config(
    config: EngineConfig, lengths: str | None, max_batch: int
) -> tuple[EngineConfig, list[DraftLengthChoice]]:
    """The engine for the draft lengths asked for, and these lengths; each is a cell of its own.

    Args:
        config: with speculation on.
        lengths: `--k`; None: what the configuration's own policy chooses.
        max_batch: the largest of `--batch`.

    Raises:
        ValueError: a length or batch size does not fit.
    """
    speculative = config.speculative
    assert isinstance(speculative, SpeculativeConfig), "off has no draft length"
    choices = _choices(lengths, speculative)
    if max_batch > config.max_num_seqs:
        raise ValueError(
            f"--batch {max_batch} is above --max-num-seqs {config.max_num_seqs}; raise the latter"
        )
    numbers = [choice for choice in choices if isinstance(choice, int)]
    longest = max(numbers) if OWN not in choices else max(speculative.max_draft_tokens, *numbers, 0)
    ladder = config.capture.draft_lengths or DEFAULT_DRAFT_LENGTHS
    ladder = tuple(
        sorted({0, longest, *numbers, *(length for length in ladder if length <= longest)})
    )
    return (
        replace(
            config,
            speculative=replace(speculative, max_draft_tokens=longest),
            capture=replace(config.capture, draft_lengths=ladder),
        ),
        choices,
    )


def _choices(lengths: str | None, speculative: SpeculativeConfig) -> list[DraftLengthChoice]:
    own = OWN if speculative.adaptive is not False else speculative.max_draft_tokens
    if lengths is None:
        return [own]
    parts = [part.strip() for part in lengths.split(",")]
    if OWN in parts and own != OWN:
        raise ValueError(f"--k {lengths!r}: there is nothing adaptive with --adaptive off")
    numbers = ",".join(part for part in parts if part != OWN)
    fixed: list[DraftLengthChoice] = []
    if numbers or OWN not in parts:
        fixed.extend(parse_numbers("--k", numbers or lengths, minimum=1))
    return [*fixed, OWN] if OWN in parts else fixed


def parse_numbers(flag: str, text: str, *, minimum: int) -> list[int]:
    """`1,2,8` as integers, ascending, without repeats.

    Raises:
        ValueError: naming the flag.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= minimum for part in parts):
        raise ValueError(f"{flag} {text!r}: expected integers >= {minimum} with commas between")
    return sorted({int(part) for part in parts})


def _select(found: dict[str, list[Prompt]], names: list[str] | None) -> dict[str, list[Prompt]]:
    for name in names or []:
        if name not in found:
            raise ValueError(f"--workload {name}: the prompt lists have {', '.join(found)}")
    return {name: found[name] for name in names} if names else found


def _pairs(engine: Engine, plan: PairPlan) -> list[Pair]:
    runner = PairRunner(engine, max_tokens=plan.max_tokens)
    first = next(iter(plan.workloads.values()))[0]
    runner.warm_up(first)
    with counting("measuring pairs", plan.num_pairs) as progress:
        return runner.run_plan(plan, progress)


def _steps(engine: Engine, plan: PairPlan, replays: int) -> list[StepTime]:
    note("measuring step times")
    draft_lengths = engine.resolved.table.draft_lengths
    room = engine.resolved.sizes.max_model_len - max(draft_lengths) - 2
    contexts = sorted({min(_SHORT, room), min(_LONG, room)})
    return [
        step
        for size in plan.batch_sizes
        for context in contexts
        for step in step_times(
            engine,
            batch_size=size,
            draft_lengths=draft_lengths,
            context=context,
            num_replays=replays,
        )
    ]


def _against(measured: Measured, engine: Engine, plan: PairPlan, peering: PeerPlan) -> None:
    first = next(iter(plan.workloads.values()))
    batch_list = [
        [encode(engine.tokenizer, prompt) for prompt in batches(first, size)[0]]
        for size in plan.batch_sizes
    ]
    dtype, threads = str(engine.resolved.dtype).removeprefix("torch."), torch.get_num_threads()
    note(f"starting {peering.peer}")
    with Peer.start(peering.peer, peering.model, dtype=dtype, num_threads=threads) as peer:
        note(f"measuring {peering.rounds} rounds of {len(batch_list)} batch sizes")
        rounds = run_rounds(
            engine,
            peer,
            batch_list,
            rounds=peering.rounds,
            num_tokens=_PEER_TOKENS,
            progress=lambda one: note(
                f"round {one.round + 1}, batch {one.batch_size}: {one.own_rate:.1f} tokens/s is "
                f"{one.ratio:.2f} times {one.peer_rate:.1f}"
            ),
        )
    measured.rounds.extend(rounds)
    stdout().print(report.peer_table(rounds))


def _check_early(wanted: BenchOptions) -> None:
    """What would otherwise be refused only after minutes of measuring."""
    if not (wanted.rounds or wanted.replays or wanted.against):
        raise ValueError("nothing to measure: --rounds 0, --replays 0 and no --against")
    if wanted.against is not None and wanted.against not in PEERS:
        raise ValueError(f"--against {wanted.against}: allowed are {', '.join(PEERS)}")
    if wanted.json_file is not None:
        check_target(wanted.json_file)


def _write(file: Path, about: dict[str, Any], measured: Measured) -> None:
    write_json(file, {**about, **report.as_json(measured.pairs, measured.steps, measured.rounds)})
    note(f"written: {file}")


def _check_identical(pairs: Sequence[Pair]) -> None:
    differing = [pair for pair in pairs if pair.difference is not None]
    if differing:
        note(f"{len(differing)} of {len(pairs)} pairs differ, the first: {differing[0].difference}")
        raise typer.Exit(1)
