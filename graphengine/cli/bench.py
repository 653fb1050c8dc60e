"""`graphengine bench`: speculation off against on, in pairs; step times; a peer beside it.

Owns the flags and the order of the parts. What is measured and how is `graphengine.bench`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from capture.shapes import DEFAULT_DRAFT_LENGTHS
from graphengine.bench import environment, report
from graphengine.bench.measure import OWN, DraftLengthChoice
from graphengine.bench.pairs import Pair, PairPlan, PairRunner
from graphengine.bench.peers import report as peer_report
from graphengine.bench.peers.models import peer_model
from graphengine.bench.peers.process import Peer, PeerPlace
from graphengine.bench.peers.rounds import Contender, OwnContender, run_rounds
from graphengine.bench.results_file import check_target, write_json
from graphengine.bench.steps import StepTime, step_times
from graphengine.bench.workloads import Prompt, batches, encode, load_all
from graphengine.cli.console import counting, note, stdout
from graphengine.cli.options import EngineOptions, Model, command, open_engine
from graphengine.config import EngineConfig
from graphengine.demo import PROMPTS_FILE
from graphengine.engine import Engine
from graphengine.models.locate import DEMO_MODEL, locate_model
from graphengine.speculative_config import SpeculativeConfig

_SHORT, _LONG = 100, 2000  # tokens of context of the step times


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
        list[str] | None,
        typer.Option(
            help="Also another engine: transformers, vllm=PYTHON or llama.cpp=FOLDER, where it is "
            "installed; may be repeated.",
            metavar="NAME[=PATH]",
        ),
    ] = None
    peer_rounds: Annotated[
        int, typer.Option(help="Turns of each engine and batch of --against.", min=1)
    ] = 5
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write everything measured to this file.")
    ] = None


@command
def bench(*, model: Model = DEMO_MODEL, wanted: BenchOptions, options: EngineOptions) -> None:
    """Measure decode tokens/s with speculation off and on, interleaved in one process.

    What is on is --speculate's or GRAPHENGINE_SPECULATE's proposer, n-gram where none is named.
    `--rounds 0 --replays 0 --against transformers` measures beside the peer alone.
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
    places = [PeerPlace.parse(text) for text in wanted.against or []]
    measured = Measured()
    with closing(open_engine(model, config)) as engine:
        _measure(measured, engine, plan, wanted.replays)
        if places:
            _against(measured, engine, plan, PeerPlan(places, model, wanted.peer_rounds))
        about = environment.describe(environment.command_line("graphengine"))
        about["engine"] = environment.describe_engine(engine)
    if wanted.json_file is not None:
        _write(wanted.json_file, about, measured)
    _check_identical(measured.pairs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Everything that a run of `bench` measured, so far."""

    pairs: list[Pair] = field(default_factory=list)
    steps: list[StepTime] = field(default_factory=list)
    peers: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PeerPlan:
    """Whom to compare with."""

    places: Sequence[PeerPlace]
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
    batch_list = {
        (workload, size): [encode(engine.tokenizer, prompt) for prompt in batches(prompts, size)[0]]
        for workload, prompts in plan.workloads.items()
        for size in plan.batch_sizes
    }
    k = engine.resolved.sizes.max_draft_tokens
    contenders: list[Contender] = [OwnContender(engine, 0), OwnContender(engine, k)]
    with ExitStack() as stack:
        for place in peering.places:
            for length in (0, k):
                note(f"starting {place.name}, {f'{length} drafts' if length else 'plain'}")
                contenders.append(stack.enter_context(_start(engine, peering.model, place, length)))
        note(f"measuring {peering.rounds} rounds of {len(batch_list)} batches")
        turns = run_rounds(
            contenders,
            batch_list,
            rounds=peering.rounds,
            num_tokens=plan.max_tokens,
            progress=lambda one: note(
                f"round {one.round + 1}, {one.workload}, batch {one.batch_size}: {one.contender} "
                f"{'with drafts' if one.k else 'plain'} {one.rate:.1f} tokens/s"
            ),
        )
        console = stdout()
        console.print(peer_report.peer_table(turns))
        console.print(peer_report.contender_table(contenders))
        measured.peers.update(peer_report.as_json(contenders, turns))


def _start(engine: Engine, model: str, place: PeerPlace, k: int) -> AbstractContextManager[Peer]:
    dtype = str(engine.resolved.dtype).removeprefix("torch.")
    return Peer.start(
        place,
        peer_model(place, locate_model(model), dtype),
        k=k,
        dtype=dtype,
        threads=torch.get_num_threads(),
        max_num_seqs=engine.config.max_num_seqs,
    )


def _check_early(wanted: BenchOptions) -> None:
    """What would otherwise be refused only after minutes of measuring."""
    if not (wanted.rounds or wanted.replays or wanted.against):
        raise ValueError("nothing to measure: --rounds 0, --replays 0 and no --against")
    if wanted.json_file is not None:
        check_target(wanted.json_file)


def _write(file: Path, about: dict[str, Any], measured: Measured) -> None:
    write_json(file, {**about, **report.as_json(measured.pairs, measured.steps), **measured.peers})
    note(f"written: {file}")


def _check_identical(pairs: Sequence[Pair]) -> None:
    differing = [pair for pair in pairs if pair.difference is not None]
    if differing:
        note(f"{len(differing)} of {len(pairs)} pairs differ, the first: {differing[0].difference}")
        raise typer.Exit(1)
