"""`graphengine check-lossless`: the promise of speculation, verified on a user's own requests.

Owns the flags, and which of two checks they ask for: identity of tokens, or of distributions. The
checks are `graphengine.bench`'s.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from graphengine.bench import environment, lossless_report
from graphengine.bench.identity import IdentityCheck, check_identity
from graphengine.bench.laws import ON_SEEDS, LawCheck, check_laws
from graphengine.bench.results_file import check_target, write_json
from graphengine.bench.serve import Asked, make_jobs
from graphengine.bench.workloads import Prompt, encode, load_all
from graphengine.cli.console import counting, note, stdout
from graphengine.cli.options import (
    EngineOptions,
    Model,
    SamplingOptions,
    command,
    open_engine,
)
from graphengine.config import EngineConfig
from graphengine.demo import PROMPTS_FILE
from graphengine.engine import Engine
from graphengine.models.locate import DEMO_MODEL
from graphengine.models.tokenizer import check_unicode
from graphengine.sampling.params import SamplingParams
from graphengine.speculative_config import SpeculativeConfig

_EXACT, _LAW = (2, 128), (200, 8)  # samples of a prompt and tokens of an answer, by default
_GIVEN = "given"  # the group of --prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckOptions:
    """Flags of what is checked, and how often."""

    prompts: Annotated[
        list[Path] | None,
        typer.Option("--prompts", help="JSON prompt list; may be repeated. Default: the demo's."),
    ] = None
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", help="A prompt, as `generate` takes it; may be repeated."),
    ] = None
    k: Annotated[
        int | None,
        typer.Option(
            "--k", help="Most drafts a step. Default: that of --proposer.", metavar="K", min=1
        ),
    ] = None
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option", help="An option of the proposer; may be repeated.", metavar="NAME=VALUE"
        ),
    ] = None
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples",
            help="Answers to each prompt where --temperature is above 0. "
            f"Default: {_EXACT[0]}, or {_LAW[0]} to compare distributions.",
            metavar="N",
            min=1,
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help=f"Most tokens of an answer. Default: {_EXACT[1]}, or {_LAW[1]} to compare "
            "distributions.",
            min=1,
        ),
    ] = None
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write everything found to this file.")
    ] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What the flags ask for, checked."""

    prompts: dict[str, list[Prompt]]
    texts: list[str]
    params: SamplingParams  # without a seed: each request has its own
    first_seed: int
    samples: int
    compares_laws: bool


@command
def check_lossless(
    *,
    model: Model = DEMO_MODEL,
    wanted: CheckOptions,
    sampling: SamplingOptions,
    options: EngineOptions,
) -> None:
    """Verify on your own prompts and parameters that speculation changes nothing.

    One engine answers with speculation off and on. Exit code 1: there is a difference, or nothing
    was drafted, so that nothing was shown. What is on is --proposer's (or --speculate's, which is
    the same flag) or GRAPHENGINE_SPECULATE's proposer, n-gram where none is named. --seed is the
    first of the requests' seeds; 0 where it is left out.
    """
    # Left to itself it may find that drafts do not pay here, and there is nothing to check.
    is_fixed = options.adaptive is None
    config = check_config(options.speculating_config(), wanted, is_fixed=is_fixed)
    assert isinstance(config.speculative, SpeculativeConfig), "off has nothing to verify"
    plan = make_plan(model, wanted, sampling, config.speculative.verification)
    if wanted.json_file is not None:
        check_target(wanted.json_file)
    with closing(open_engine(model, config)) as engine:
        check = _check(engine, plan)
        _print(engine, check)
        about = environment.describe(environment.command_line("graphengine"))
        about["engine"] = environment.describe_engine(engine)
    verdict = check.verdict
    if wanted.json_file is not None:
        about["check"] = {
            "compared": "distributions" if plan.compares_laws else "tokens",
            "params": asdict(plan.params),
            "first_seed": plan.first_seed,
            "samples": plan.samples,
            "holds": verdict.holds,
            "verdict": verdict.text,
        }
        write_json(wanted.json_file, {**about, **check.as_json()})
        note(f"written: {wanted.json_file}")
    if not verdict.holds:
        note(verdict.text)
        raise typer.Exit(1)
    stdout().print(escape(verdict.text), soft_wrap=True)


def check_config(
    config: EngineConfig, wanted: CheckOptions, *, is_fixed: bool = False
) -> EngineConfig:
    """The engine for the draft length and the options asked for.

    Args:
        config: with speculation on.
        is_fixed: whether every step is to have as many drafts as it may.

    Raises:
        ValueError: a flag has a value that is not allowed.
    """
    speculative = config.speculative
    assert isinstance(speculative, SpeculativeConfig), "off has nothing to verify"
    if wanted.k is not None:
        speculative = replace(speculative, max_draft_tokens=wanted.k)
    if is_fixed:
        speculative = replace(speculative, adaptive=False)
    options = {**dict(speculative.options), **_options(wanted.option or ())}
    speculative = replace(speculative, options=tuple(options.items()))
    return replace(config, speculative=speculative)


def _options(given: Sequence[str]) -> dict[str, object]:
    """`NAME=VALUE` each, the value as JSON where it is that, else as text."""
    found: dict[str, object] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--option {text}: expected NAME=VALUE")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found


def make_plan(
    model: str, wanted: CheckOptions, sampling: SamplingOptions, verification: str
) -> Plan:
    """What to ask how often: of `rejection`, enough to compare distributions.

    Raises:
        ValueError: a flag has a value that is not allowed, or a file cannot be read.
    """
    is_greedy = sampling.params(model, wanted.max_tokens, 1).temperature == 0
    compares_laws = verification == "rejection" and not is_greedy
    samples, max_tokens = _LAW if compares_laws else _EXACT
    params = sampling.params(model, wanted.max_tokens or max_tokens, max_tokens)
    if is_greedy and (wanted.samples or 1) > 1:
        raise ValueError(
            f"--samples {wanted.samples}: greedy answers to a prompt are all the same; leave it "
            "out, or set --temperature above 0"
        )
    texts = wanted.prompt or []
    for text in texts:
        check_unicode("--prompt", text)
        if not text.strip():
            raise ValueError("--prompt: is empty")
    files = wanted.prompts or ([] if texts else [PROMPTS_FILE])
    return Plan(
        prompts=load_all(files),
        texts=texts,
        params=replace(params, seed=None),
        first_seed=params.seed or 0,
        samples=1 if is_greedy else (wanted.samples or samples),
        compares_laws=compares_laws,
    )


def _check(engine: Engine, plan: Plan) -> IdentityCheck | LawCheck:
    asked = _asked(engine, plan)
    first, second = (
        make_jobs(asked, plan.params, samples=plan.samples, first_seed=plan.first_seed + offset)
        for offset in (0, ON_SEEDS)
    )
    with counting("answers to draw, off and on", 2 * len(first)) as progress:
        if plan.compares_laws:
            return check_laws(engine, first, second, progress)
        return check_identity(engine, first, progress)


def _asked(engine: Engine, plan: Plan) -> list[Asked]:
    has_template = engine.tokenizer is not None and engine.tokenizer.has_chat_template
    given = [
        Prompt(id=f"prompt-{number}", kind=_GIVEN, chat=has_template, text=text)
        for number, text in enumerate(plan.texts, 1)
    ]
    groups: dict[str, Sequence[Prompt]] = {**plan.prompts}
    if given:
        groups[_GIVEN] = [*groups.get(_GIVEN, ()), *given]
    return [
        Asked(group=name, prompt_id=prompt.id, token_ids=encode(engine.tokenizer, prompt))
        for name, prompts in groups.items()
        for prompt in prompts
    ]


def _print(engine: Engine, check: IdentityCheck | LawCheck) -> None:
    console = stdout()
    if isinstance(check, LawCheck):
        console.print(lossless_report.law_table(check))
        for place in check.different:
            console.print(lossless_report.place_line(place), soft_wrap=True)
        return
    console.print(lossless_report.identity_table(check))
    if check.flips:
        console.print(lossless_report.flip_table(check.flips, _decoder(engine)))
        console.print(
            "top-2 gap: how far the likeliest token leads there, in log-probability, by the "
            "model's own logits; about 0 is a near-tie",
            soft_wrap=True,
        )


def _decoder(engine: Engine) -> Callable[[int], str]:
    tokenizer = engine.tokenizer
    assert tokenizer is not None, "prompts were encoded with it"
    return lambda token: tokenizer.decode([token], skip_special_tokens=False)
