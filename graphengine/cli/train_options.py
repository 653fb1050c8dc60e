"""Flags of `graphengine train-draft`: what is trained on, what is trained, and how.

Owns their panels and what they mean. Values are checked by `proposers.training`, whose messages
the user sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer

from proposers.training import (
    KINDS,
    CorpusConfig,
    DraftConfig,
    Eagle3Flags,
    Kind,
    Precision,
    TrainConfig,
)

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
