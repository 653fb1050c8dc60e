"""`graphengine train-draft`: a draft for a target, trained by distillation from local text.

Owns the order of things: chats, corpus, teacher, training. The flags are `train_options`', what is
trained and how is `proposers.training`'s; the teacher is `graphengine.distill`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from graphengine.cli.console import long_progress, note, start_progress, stdout
from graphengine.cli.options import Model, command
from graphengine.cli.train_options import CorpusOptions, DraftOptions, TrainingOptions
from graphengine.distill import EngineTeacher, describe_target, fingerprint, layer_sizes
from graphengine.llm import LLM
from graphengine.models.config import ModelConfig
from graphengine.models.loader import OpenedModel, open_model
from graphengine.self_chats import MAX_MODEL_LEN, MAX_NUM_SEQS, write_answers, write_chats
from proposers.training import (
    CSV_FILE,
    PNG_FILE,
    Chats,
    CorpusConfig,
    DraftConfig,
    DraftJob,
    Piece,
    Point,
    can_draw,
    check_draft_vocab,
    read_corpus,
)


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
    _check(draft_config, corpus_config, opened.config)
    tokenizer = opened.load_tokenizer()
    if tokenizer is None:
        raise ValueError(f"model {target} has no tokenizer, so no text can be read for it")
    work = out / "work" if work is None else work
    work.mkdir(parents=True, exist_ok=True)
    pieces = read_corpus(
        corpus.text or [],
        _chats(target, opened.config, corpus, work),
        tokenizer.encode,
        corpus_config,
        vocab_size=opened.config.vocab_size,
    )
    _describe(pieces)
    teacher = _load_teacher(opened, draft_config, corpus_config)
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


def _check(draft: DraftConfig, corpus: CorpusConfig, model: ModelConfig) -> None:
    """What the target does not allow is refused before hours are spent on chats."""
    limit = model.max_position_embeddings
    if corpus.length > limit:
        raise ValueError(
            f"length={corpus.length}: the target's limit is max_position_embeddings={limit}; "
            "lower --length"
        )
    draft.resolved_taps(model.num_layers)
    draft.sizes(layer_sizes(model))
    if draft.draft_vocab is not None:
        check_draft_vocab(
            draft.draft_vocab, vocab_size=model.vocab_size, always=model.eos_token_ids
        )


def _load_teacher(opened: OpenedModel, draft: DraftConfig, corpus: CorpusConfig) -> EngineTeacher:
    """The target, as what a draft learns from."""
    with start_progress() as progress:
        return EngineTeacher(
            opened,
            taps=draft.resolved_taps(opened.config.num_layers),
            max_length=corpus.length,
            progress=lambda *done: progress("weights", *done),
        )


def _chats(target: str, model: ModelConfig, corpus: CorpusOptions, work: Path) -> list[Chats]:
    """What chats to train on; what is asked of the target is generated first."""
    count, questions, found = 0, [], []
    if corpus.chats is not None and corpus.chats.isascii() and corpus.chats.isdecimal():
        count = int(corpus.chats)
        if count < 1:
            raise ValueError(f"--chats {count}: expected a file, or a number from 1 on")
    elif corpus.chats is not None:
        found.append(Chats(Path(corpus.chats)))
    if corpus.questions is not None:
        questions = _read_questions(corpus.questions)
    if not count and not questions:
        return found
    with start_progress() as progress:
        llm = LLM(
            target,
            max_num_seqs=MAX_NUM_SEQS,
            max_model_len=min(MAX_MODEL_LEN, model.max_position_embeddings),
            speculative="off",
            progress=progress,
        )
    with closing(llm), long_progress() as show:
        # Their names say whose they are: targets may share the folder.
        whose = fingerprint(llm.engine.runner.decoder.weights, model)[:12]
        chats = Chats(work / f"chats-{whose}.jsonl", count)
        answers = Chats(work / f"answers-{whose}.jsonl", len(questions))
        if questions:  # first, since what is there may be refused
            write_answers(
                llm, answers.file, questions, lambda done: show("answers", done, len(questions), "")
            )
        if count:
            write_chats(llm, chats.file, count, lambda done: show("chats", done, count, ""))
    return found + [some for some in (chats, answers) if some.count]


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
