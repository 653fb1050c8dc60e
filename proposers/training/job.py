"""From a target and a corpus to a checkpoint: what `train-draft` does, whatever the kind of draft.

Owns the order of things: vocabulary, hidden states, training, curves, export. Everything below is
told here what to do.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from proposers.training import curves, export
from proposers.training.corpus import Piece, corpus_digest
from proposers.training.draft_config import DraftConfig
from proposers.training.draft_vocab import choose_draft_vocab
from proposers.training.heads import Draft, Eagle1, Eagle3, Mtp
from proposers.training.hidden_cache import Progress, build_cache
from proposers.training.objective import Objective
from proposers.training.small_llama import SmallLlama
from proposers.training.target import Target, Teacher
from proposers.training.trainer import Point, TrainConfig, Trainer

Tensor = torch.Tensor

CSV_FILE, PNG_FILE = "training.csv", "training.png"
_DRAFT_MODEL_LAYERS = 2


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DraftJob:
    """One draft to train. Run again after it was stopped, it goes on where it was.

    Attributes:
        target: on the host.
        teacher: with the taps that `draft` asks for.
        pieces: the corpus.
        draft: what is trained.
        training: how.
        out: folder of the checkpoint and its curves.
        work: folder of hidden states and of the run's own checkpoint, which drafts of other kinds
            may share; of no use afterwards.
        device: what is trained on.
    """

    target: Target
    teacher: Teacher
    pieces: Sequence[Piece]
    draft: DraftConfig
    training: TrainConfig
    out: Path
    work: Path
    device: torch.device

    def run(self, progress: Progress | None = None) -> list[Point]:
        """Train, and write checkpoint and curves; returns what was measured.

        Args:
            progress: called with (phase, done, total, what).

        Raises:
            ValueError: settings that contradict the target or each other, or a folder that holds
                another run.
        """
        target, config = self.target, self.draft
        assert tuple(self.teacher.taps) == config.resolved_taps(target.num_layers), (
            f"the teacher has taps {self.teacher.taps}"
        )
        draft_ids = self._draft_ids()
        torch.manual_seed(self.training.seed)
        on_device = target.to(self.device)
        draft = make_draft(config, on_device, draft_ids).to(self.device)
        objective = Objective(
            on_device, draft_ids, steps=self.training.unroll, decay=self.training.decay
        )
        cache = build_cache(self.work / "hidden", target, self.teacher, self.pieces, progress)
        trainer = Trainer(
            draft, objective, cache, self.pieces, config=self.training, device=self.device
        )
        self.out.mkdir(parents=True, exist_ok=True)
        checkpoint = self.work / f"{config.kind}.pt"
        points = trainer.run(
            checkpoint, self._key(), progress=progress, measured=self._write_curves
        )
        self._export(draft, draft_ids)
        return points

    def _draft_ids(self) -> Tensor | None:
        """Ids that can be drafted; None: all. EAGLE-3's format has tables for them always."""
        target, config = self.target, self.draft
        if config.kind != "eagle3":
            return None
        if config.draft_vocab is None:
            return torch.arange(target.vocab_size)
        return choose_draft_vocab(
            self.pieces,
            config.draft_vocab,
            vocab_size=target.vocab_size,
            always=target.eos_token_ids,
        )

    def _key(self) -> str:
        """Everything that the weights follow from."""
        corpus = [self.target.fingerprint, *self.teacher.taps, corpus_digest(self.pieces)]
        about = [corpus, asdict(self.draft), asdict(self.training)]
        return hashlib.sha256(json.dumps(about).encode()).hexdigest()

    def _write_curves(self, points: Sequence[Point]) -> None:
        curves.write_csv(points, self.out / CSV_FILE)
        if curves.can_draw():
            title = f"{self.draft.kind} for {self.target.name}"
            curves.write_png(points, self.out / PNG_FILE, title)

    def _export(self, draft: Draft, draft_ids: Tensor | None) -> None:
        target, config = self.target, self.draft
        sizes = config.sizes(target.sizes)
        if config.kind == "eagle3":
            assert draft_ids is not None
            about = export.eagle3_config(
                sizes,
                target,
                taps=self.teacher.taps,
                draft_vocab_size=len(draft_ids),
                speculative_tokens=self.training.unroll,
                flags=asdict(config.flags),
            )
            tensors = export.eagle3_tensors(draft, draft_ids, target.vocab_size)
        elif config.kind == "eagle1":
            about = export.eagle1_config(sizes, target)
            tensors = export.eagle1_tensors(draft, target)
        elif config.kind == "mtp":
            about, tensors = export.mtp_config(sizes, target), export.prefixed(draft)
        else:
            layers = config.layers or _DRAFT_MODEL_LAYERS
            about = export.draft_model_config(sizes, target, num_layers=layers)
            tensors = export.prefixed(draft)
        dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        export.save_checkpoint(self.out, about, tensors, dtype)


def make_draft(config: DraftConfig, target: Target, draft_ids: Tensor | None) -> Draft:
    """A fresh module; its random numbers are torch's own."""
    sizes = config.sizes(target.sizes)
    if config.kind == "eagle1":
        return Eagle1(target, sizes)
    if config.kind == "mtp":
        return Mtp(target, sizes)
    if config.kind == "draft_model":
        layers = config.layers or _DRAFT_MODEL_LAYERS
        return SmallLlama(sizes, num_layers=layers, vocab_size=target.vocab_size)
    assert draft_ids is not None
    return Eagle3(
        target,
        sizes,
        num_taps=len(config.resolved_taps(target.num_layers)),
        draft_ids=draft_ids,
        flags=config.flags,
    )
