"""`graphengine train-draft`: a draft for a target, trained by distillation from local text.

Owns the flags and the order of things: chats, corpus, teacher, training. What is trained and how is
`proposers.training`'s; the teacher is `graphengine.distill`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from rich.table import Table

from graphengine.cli.console import long_progress, note, start_progress, stdout
from graphengine.cli.options import Model, command
from graphengine.distill import EngineTeacher, describe_target
from graphengine.llm import LLM
from graphengine.models.config import ModelConfig
from graphengine.models.loader import open_model
from graphengine.self_chats import MAX_MODEL_LEN, MAX_NUM_SEQS, write_answers, write_chats
from proposers.training import (
    CSV_FILE,
    KINDS,
    PNG_FILE,
    CorpusConfig,
    DraftConfig,
    DraftJob,
    Eagle3Flags,
    Kind,
    Piece,
    Point,
    Precision,
    TrainConfig,
    can_draw,
    read_corpus,
)

CHATS_FILE, ANSWERS_FILE = "chats.jsonl", "answers.jsonl"
_CORPUS, _DRAFT, _TRAINING = "Corpus", "Draft", "Training"
_CORPUS_DEFAULTS, _FLAG_DEFAULTS, _TRAIN_DEFAULTS = CorpusConfig(), Eagle3Flags(), TrainConfig()


def _option(panel: str, flag: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(flag, help=help, metavar=metavar, rich_help_panel=panel)


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusOptions:
    """Flags of what is trained on."""

    text: Annotated[
        list[Path] | None,
        _option(_CORPUS, "--text", "A text file, or a folder of them; may be repeated.", "PATH"),
    ] = None
    chats: Annotated[
        str | None,
        _option(
            _CORPUS,
            "--chats",
            "Chats as JSON lines with prompt_ids and output_ids, or how many the target is to have "
            "with itself.",
            "FILE|N",
        ),
    ] = None
    questions: Annotated[
        Path | None,
        _option(_CORPUS, "--questions", "A file of questions for the target, a line each.", "FILE"),
    ] = None
    length: Annotated[
        int, _option(_CORPUS, "--length", "Most tokens of a piece of text.", "TOKENS")
    ] = _CORPUS_DEFAULTS.length
    held_out: Annotated[
        float,
        _option(_CORPUS, "--held-out", "Part of the texts that is measured on instead.", "PART"),
    ] = _CORPUS_DEFAULTS.held_out
    text_tokens: Annotated[
        int | None,
        _option(_CORPUS, "--text-tokens", "Most tokens of --text, a sample of its files.", "N"),
    ] = None

    def config(self) -> CorpusConfig:
        """What they mean. Raises ValueError for a value that is not allowed."""
        return CorpusConfig(
            length=self.length, held_out=self.held_out, max_text_tokens=self.text_tokens
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftOptions:
    """Flags of what is trained."""

    kind: Annotated[str, _option(_DRAFT, "--kind", f"One of {', '.join(KINDS)}.")] = "eagle3"
    draft_vocab: Annotated[
        int | None,
        _option(_DRAFT, "--draft-vocab", "eagle3: most frequent tokens to draft.", "N"),
    ] = None
    taps: Annotated[
        str | None,
        _option(
            _DRAFT, "--taps", "eagle3: layers whose inputs it sees. Default: 2,L/2,L-3.", "T,T,T"
        ),
    ] = None
    fc_norm: Annotated[
        bool, _option(_DRAFT, "--fc-norm/--no-fc-norm", "eagle3: a norm for each of the taps.")
    ] = _FLAG_DEFAULTS.fc_norm
    norm_before_residual: Annotated[
        bool,
        _option(
            _DRAFT,
            "--norm-before-residual/--no-norm-before-residual",
            "eagle3: the layer adds to the normed state.",
        ),
    ] = _FLAG_DEFAULTS.norm_before_residual
    norm_output: Annotated[
        bool, _option(_DRAFT, "--norm-output", "eagle3: feed the normed output back.")
    ] = _FLAG_DEFAULTS.norm_output
    layers: Annotated[
        int | None, _option(_DRAFT, "--layers", "draft_model: layers. Default: 2.", "N")
    ] = None
    hidden: Annotated[
        int | None, _option(_DRAFT, "--hidden", "draft_model: width. Default: the target's.", "N")
    ] = None
    intermediate: Annotated[
        int | None, _option(_DRAFT, "--intermediate", "Width of the MLP.", "N")
    ] = None
    kv_heads: Annotated[
        int | None,
        _option(
            _DRAFT, "--kv-heads", "Key and value heads of a layer. Default: the target's.", "N"
        ),
    ] = None
    dtype: Annotated[str, _option(_DRAFT, "--dtype", "bfloat16 or float32, of the checkpoint.")] = (
        "bfloat16"
    )

    def config(self) -> DraftConfig:
        """What they mean. Raises ValueError for a value that is not allowed."""
        try:
            taps = None if self.taps is None else tuple(map(int, self.taps.split(",")))
        except ValueError:
            raise ValueError(f"--taps {self.taps}: expected layers, such as 2,15,27") from None
        return DraftConfig(
            kind=cast(Kind, self.kind),
            taps=taps,
            draft_vocab=self.draft_vocab,
            flags=Eagle3Flags(
                fc_norm=self.fc_norm,
                norm_before_residual=self.norm_before_residual,
                norm_output=self.norm_output,
            ),
            layers=self.layers,
            hidden=self.hidden,
            intermediate=self.intermediate,
            kv_heads=self.kv_heads,
            dtype=cast(Any, self.dtype),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingOptions:
    """Flags of how it is trained."""

    steps: Annotated[int, _option(_TRAINING, "--steps", "Steps of the optimiser.", "N")] = (
        _TRAIN_DEFAULTS.steps
    )
    batch_tokens: Annotated[int, _option(_TRAINING, "--batch-tokens", "Tokens a step.", "N")] = (
        _TRAIN_DEFAULTS.batch_tokens
    )
    learning_rate: Annotated[
        float, _option(_TRAINING, "--learning-rate", "At its highest.", "RATE")
    ] = _TRAIN_DEFAULTS.learning_rate
    unroll: Annotated[
        int, _option(_TRAINING, "--unroll", "Drafts in a row that are trained and measured.", "K")
    ] = _TRAIN_DEFAULTS.unroll
    first_only: Annotated[
        float,
        _option(
            _TRAINING,
            "--first-only",
            "Part of the steps, at first, that train only the first of these, at a third of the "
            "cost.",
            "PART",
        ),
    ] = _TRAIN_DEFAULTS.first_only
    decay: Annotated[
        float, _option(_TRAINING, "--decay", "Weight of a draft's loss to the one before.", "X")
    ] = _TRAIN_DEFAULTS.decay
    measure_every: Annotated[
        int, _option(_TRAINING, "--measure-every", "Steps between measurements.", "N")
    ] = _TRAIN_DEFAULTS.measure_every
    save_every: Annotated[
        int, _option(_TRAINING, "--save-every", "Steps between checkpoints to resume from.", "N")
    ] = _TRAIN_DEFAULTS.save_every
    seed: Annotated[int, _option(_TRAINING, "--seed", "Of weights and order.", "N")] = 0
    precision: Annotated[
        str,
        _option(_TRAINING, "--precision", "auto, bfloat16 or float32, of matrix products."),
    ] = "auto"
    device: Annotated[
        str, _option(_TRAINING, "--device", "auto, cpu or cuda. The target runs on the CPU.")
    ] = "auto"

    def config(self) -> TrainConfig:
        """What they mean. Raises ValueError for a value that is not allowed."""
        return TrainConfig(
            steps=self.steps,
            batch_tokens=self.batch_tokens,
            learning_rate=self.learning_rate,
            unroll=self.unroll,
            first_only=self.first_only,
            decay=self.decay,
            measure_every=self.measure_every,
            save_every=self.save_every,
            seed=self.seed,
            precision=cast(Precision, self.precision),
        )

    def torch_device(self) -> torch.device:
        """What is trained on. Raises ValueError where there is no such device."""
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"--device {self.device}: expected auto, cpu or cuda")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: there is none; use cpu")
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.device(wanted if self.device == "auto" else self.device)


@command
def train_draft(
    *,
    target: Model,
    out: Annotated[
        Path, typer.Option("--out", help="Folder of the checkpoint and its curves.", metavar="DIR")
    ],
    work: Annotated[
        Path | None,
        typer.Option(
            "--work",
            help="Folder of chats, hidden states and checkpoints to resume from; may be deleted "
            "afterwards. Default: DIR/work.",
            metavar="DIR",
        ),
    ] = None,
    draft: DraftOptions,
    corpus: CorpusOptions,
    training: TrainingOptions,
) -> None:
    """Train a draft for a target from local text and from chats that it has with itself.

    The same command, given again, goes on where it was stopped.
    """
    draft_config, corpus_config = draft.config(), corpus.config()
    train_config, device = training.config(), training.torch_device()
    if not corpus.text and corpus.chats is None and corpus.questions is None:
        raise ValueError("nothing to train on: give --text, --chats or --questions")
    opened = open_model(target)
    taps = draft_config.resolved_taps(opened.config.num_layers)
    tokenizer = opened.load_tokenizer()
    if tokenizer is None:
        raise ValueError(f"model {target} has no tokenizer, so no text can be read for it")
    work = out / "work" if work is None else work
    work.mkdir(parents=True, exist_ok=True)
    chats = _chat_files(target, opened.config, corpus, work)
    pieces = read_corpus(
        corpus.text or [],
        chats,
        tokenizer.encode,
        corpus_config,
        vocab_size=opened.config.vocab_size,
    )
    _describe(pieces)
    with start_progress() as progress:
        teacher = EngineTeacher(
            opened,
            taps=taps,
            max_length=corpus_config.length,
            progress=lambda *done: progress("weights", *done),
        )
    job = DraftJob(
        target=describe_target(target, opened.config, teacher.weights),
        teacher=teacher,
        pieces=pieces,
        draft=draft_config,
        training=train_config,
        out=out,
        work=work,
        device=device,
    )
    with long_progress() as show:
        points = job.run(show)
    if draft_config.kind == "draft_model":
        tokenizer.save(out)
    _print(points, out)


def _chat_files(target: str, model: ModelConfig, corpus: CorpusOptions, work: Path) -> list[Path]:
    """Files of chats; what is asked of the target is generated first."""
    count, files, questions = 0, [], []
    if corpus.chats is not None and corpus.chats.isascii() and corpus.chats.isdecimal():
        count = int(corpus.chats)
        if count < 1:
            raise ValueError(f"--chats {count}: expected a file, or a number from 1 on")
        files.append(work / CHATS_FILE)
    elif corpus.chats is not None:
        files.append(Path(corpus.chats))
    if corpus.questions is not None:
        questions = _read_questions(corpus.questions)
        files.append(work / ANSWERS_FILE)
    if not count and not questions:
        return files
    with start_progress() as progress:
        llm = LLM(
            target,
            max_num_seqs=MAX_NUM_SEQS,
            max_model_len=min(MAX_MODEL_LEN, model.max_position_embeddings),
            speculative="off",
            progress=progress,
        )
    with closing(llm), long_progress() as show:
        if count:
            write_chats(llm, files[0], count, lambda done: show("chats", done, count, ""))
        if questions:
            write_answers(
                llm, files[-1], questions, lambda done: show("answers", done, len(questions), "")
            )
    return files


def _read_questions(file: Path) -> list[str]:
    """Lines that are not empty."""
    if not file.is_file():
        raise ValueError(f"--questions {file}: no such file")
    questions = [line.strip() for line in file.read_text("utf-8").splitlines() if line.strip()]
    if not questions:
        raise ValueError(f"--questions {file}: the file is empty")
    return questions


def _describe(pieces: Sequence[Piece]) -> None:
    for held_out, name in ((False, "to train on"), (True, "held out")):
        sizes = [len(piece.token_ids) for piece in pieces if piece.held_out == held_out]
        note(f"{name}: {len(sizes)} pieces, {sum(sizes)} tokens")


def _print(points: Sequence[Point], out: Path) -> None:
    table = Table(title="held-out acceptance of greedy drafts, given the drafts before")
    table.add_column("text")
    for position in range(1, len(points[0].acceptance) + 1):
        table.add_column(f"draft {position}", justify="right")
    table.add_column("tokens a step", justify="right")
    last = [point for point in points if point.step == points[-1].step]
    for point in last:
        rates = [f"{rate:.1%}" for rate in point.acceptance]
        table.add_row(point.kind, *rates, f"{point.mean_length:.2f}")
    stdout().print(table)
    size = (out / "model.safetensors").stat().st_size
    note(f"written: {out} ({size} bytes of weights, {CSV_FILE})")
    if can_draw():
        note(f"curves: {out / PNG_FILE}")
    else:
        note(f"no {PNG_FILE}: it needs matplotlib, of the extra graphengine[train]")
