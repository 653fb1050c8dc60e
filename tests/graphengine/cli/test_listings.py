"""`capture-plan`, `proposers`, help and version; colours and progress."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from graphengine.cli.console import StartProgress, has_colour
from graphengine.cli.drafts import legend, paint
from graphengine.cli.options import EngineOptions
from graphengine.cli.plan import plan_bytes
from graphengine.config import EngineConfig
from graphengine.engine import Engine
from graphengine.memory import plan_memory
from graphengine.models import loader
from graphengine.models.tokenizer import Tokenizer
from graphengine.speculative_config import SpeculativeConfig
from graphengine.versions import version
from proposers import registry
from tests.graphengine.cli.conftest import Cli
from tests.tiny import make_tokenizer

COMMANDS = ("generate", "chat", "bench", "check-lossless", "capture-plan", "proposers", "demo")
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def test_help_names_every_command(cli: Cli) -> None:
    """Guards against a command that is not registered; no command at all shows the help."""
    for arguments in ([], ["--help"]):
        result = cli(*arguments)
        assert result.code == 0
        assert all(name in result.out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(cli: Cli, name: str) -> None:
    """Guards against options that cannot be turned into a command line."""
    result = cli(name, "--help")
    assert result.code == 0
    assert ("--max-model-len" in result.out) == (name != "proposers")


def test_version(cli: Cli) -> None:
    """Guards against a version other than the installed one."""
    result = cli("--version")
    assert result.code == 0
    assert result.out.startswith(f"graphengine {version('graphengine') or '('}")


def test_plan_is_what_is_allocated(checkpoint: Path) -> None:
    """Guards against estimates that drift from the real buffers (test_memory.py has the rest)."""
    config = EngineOptions(
        compile="off", lazy=True, max_num_seqs=3, max_model_len=256, speculate="ngram:2"
    ).config()
    engine = Engine(checkpoint, config)
    planned = plan_bytes(engine.resolved)
    assert sum(planned.buffers.values()) == engine.runner.buffers.num_bytes
    assert planned.memory == plan_memory(engine.resolved)
    assert list(planned.cells) == list(engine.resolved.table)
    engine.close()


def test_plan_of_a_draft_is_what_is_allocated(cli: Cli, checkpoint: Path) -> None:
    """Guards a plan that leaves out the draft's weights, KV, buffers or cells."""
    config = EngineOptions(
        max_num_seqs=3,
        max_model_len=256,
        speculate="draft_model:2",
        draft_model=str(checkpoint),
    ).config()
    engine = Engine(checkpoint, config)
    planned = plan_bytes(engine.resolved)
    assert sum(planned.buffers.values()) == engine.runner.buffers.num_bytes
    captured = engine.stats().capture_seconds
    assert list(map(str, planned.cells)) == list(captured)
    engine.close()
    arguments = ["--speculate", "draft_model:2", "--draft-model", "/nowhere"]
    refused = cli("capture-plan", str(checkpoint), *arguments)
    assert refused.code == 2
    assert "/nowhere" in refused.err


def test_capture_plan_lists_every_cell_without_weights(
    cli: Cli, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a dry run that is not dry, or that leaves out cells or totals."""

    def fail(*arguments: object, **options: object) -> None:
        raise AssertionError("a dry run read weights")

    monkeypatch.setattr(loader, "load_weights", fail)
    monkeypatch.setattr("graphengine.startup.load_weights", fail)
    toml = tmp_path / "capture.toml"
    toml.write_text("[capture]\nnum_reqs = [1, 3]\ndraft_lengths = [0, 2]\n")
    result = cli(
        "capture-plan", checkpoint, "--max-num-seqs", 4, "--speculate", "ngram:5",
        "--capture-config", toml, "--graph", "eager", "--lazy-capture",
    )  # fmt: skip
    assert result.code == 0
    for tier in ("greedy", "sampled", "logprobs"):
        cells = re.findall(rf"(\d+x\d+):{tier}", result.out)
        assert sorted(cells) == sorted(f"{n}x{q}" for n in (1, 3, 4) for q in (1, 3, 6))
    assert "27 cells, graph kind eager, captured on first use" in result.out
    assert re.search(r"static buffers [\d.,]+ MiB, KV cache [\d.,]+ MiB \(\d+ blocks", result.out)
    for buffer in ("token_ids", "block_table", "logits", "packed"):
        assert buffer in result.out


@pytest.mark.parametrize("width", [100, 120])
def test_proposers_lists_the_registry(
    cli: Cli, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a support matrix that hides what is refused, and why, or cuts words off."""
    monkeypatch.setattr("graphengine.cli.console.PIPED_WIDTH", width)
    result = cli("proposers")
    assert result.code == 0
    assert "…" not in result.out
    served, options, unsupported = map(_rows, re.split(r"their options|unsupported,", result.out))
    for info in registry.infos():
        if info.status == "unsupported":
            assert unsupported[info.name][-1].split() == ", ".join(info.instead).split()
            assert unsupported[info.name][2] == info.reason
            continue
        runs = "captured" if info.graph_safe else f"on {info.kind}"
        assert served[info.name][1:4] == [info.interface, info.status, runs]
        assert served[info.name][5:] == ["yes" if info.produces_probs else "no", info.summary]
        assert (info.name in options) == bool(info.options)
    assert "mock-oracle" not in result.out
    assert {"mock-oracle", "mock-eagle"} <= _rows(cli("proposers", "--testing").out).keys()


def _rows(printed: str) -> dict[str, list[str]]:
    """Cells of each row of a table, by the first of them, wrapped lines joined again."""
    found: dict[str, list[str]] = {}
    for line in printed.splitlines():
        cells = [cell.strip() for cell in line.split("│")[1:-1]]
        if cells and cells[0]:
            name, found[cells[0]] = cells[0], cells
        elif cells:
            pairs = zip(found[name], cells, strict=True)
            found[name] = [f"{old} {new}".strip() for old, new in pairs]
    return found


def test_painting_adds_colours_and_nothing_else() -> None:
    """Guards against lost or doubled text, and against colours that mix up the origins."""
    tokenizer = Tokenizer(make_tokenizer())
    token_ids = tokenizer.encode("the naïve café")[1:]
    origins = (["accepted", "recovered", "bonus"] * len(token_ids))[: len(token_ids)]
    painted = paint(tokenizer, token_ids, origins)  # type: ignore[arg-type]
    assert ESCAPE.sub("", painted) == "the naïve café"
    assert paint(tokenizer, token_ids, ["bonus"] * len(token_ids)) == "the naïve café"
    green = paint(tokenizer, token_ids, ["accepted"] * len(token_ids))
    assert set(ESCAPE.findall(green)) == {"\x1b[32m", "\x1b[0m"}
    assert "\x1b[32m" in legend(colour=True)
    assert "\x1b" not in legend(colour=False)


def test_colour_is_for_terminals_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against escape codes in pipes and against NO_COLOR being ignored."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert has_colour(Console(file=io.StringIO(), force_terminal=True))
    assert not has_colour(Console(file=io.StringIO()))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_colour(Console(file=io.StringIO(), force_terminal=True))


def test_progress_without_a_terminal_is_one_line_a_phase(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Guards against a log filled by a progress bar."""
    progress = StartProgress(None)
    for done in range(4):
        progress("weights", done, 3, "x")
    progress("capture", 2, 2, "captured")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" (")[0] for line in lines] == [
        "loading weights: 3 of 3",
        "capturing cells: 2 of 2",
    ]


def test_flags_of_speculation_reach_the_configuration() -> None:
    """Guards a field that only the library can set, and a flag that sets another."""
    options = EngineOptions(
        speculate="eagle:2",
        draft_model="head",
        override="ngram",
        override_min_match=4,
        draft_sampling="probabilistic",
        verification="rejection",
        self_check="warn",
        adaptive="1:2,5:0",
    )
    assert options.config().speculative == SpeculativeConfig(
        "eagle",
        model="head",
        max_draft_tokens=2,
        override="ngram",
        override_min_match=4,
        draft_sampling="probabilistic",
        verification="rejection",
        self_check="warn",
        adaptive={5: 0, 1: 2},
    )
    assert EngineOptions(speculate="ngram", adaptive="off").config() == EngineConfig(
        speculative=SpeculativeConfig("ngram", adaptive=False)
    )
    with pytest.raises(ValueError, match=r"adaptive '1:x': expected on, off, threshold, or"):
        EngineOptions(speculate="ngram", adaptive="1:x").config()
    with pytest.raises(ValueError, match=r"--draft-sampling, --verification: nothing drafts"):
        EngineOptions(draft_sampling="coupled", verification="exact").config()
