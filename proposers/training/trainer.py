"""The training loop: batches, optimiser, schedule, measurements, and checkpoints to resume from.

Everything random is a function of the seed and the step, so a run that was stopped and resumed ends
with the weights of one that was not, on one machine and thread count. Knows nothing of what a draft
is made of, or of its formats.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from proposers.checkpoint import UNREADABLE
from proposers.training.batches import batch_order, in_order
from proposers.training.corpus import Piece
from proposers.training.heads import Draft
from proposers.training.hidden_cache import HiddenCache, Progress
from proposers.training.objective import Acceptance, Objective
from proposers.training.optimizer import DraftOptimizer

Precision = Literal["auto", "bfloat16", "float32"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How a draft is trained."""

    steps: int = 2000  # of the optimiser
    batch_tokens: int = 1024  # a step
    learning_rate: float = 1.5e-3  # at its highest
    warmup: float = 0.05  # part of the steps in which it rises; then it falls as a half cosine
    weight_decay: float = 0.01
    clip: float = 0.5  # largest norm of a gradient
    unroll: int = 3  # drafts in a row: steps of the training-time test
    first_only: float = 0.5  # part of the steps, at first, that train the first of them alone
    decay: float = 0.8  # weight of a draft's loss relative to the one before
    measure_every: int = 250  # steps between measurements of what is held out
    save_every: int = 250  # steps between checkpoints
    seed: int = 0
    precision: Precision = "auto"  # of matrix products while training

    def __post_init__(self) -> None:
        for name in ("steps", "batch_tokens", "unroll", "measure_every", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 1")
        for name, high in (("learning_rate", 1.0), ("decay", 1.0), ("clip", math.inf)):
            if not 0 < getattr(self, name) <= high:
                raise ValueError(
                    f"{name}={getattr(self, name)}: expected a number above 0, at most {high}"
                )
        for name in ("warmup", "first_only", "weight_decay"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected a number in [0, 1)")
        if self.precision not in ("auto", "bfloat16", "float32"):
            raise ValueError(f"precision={self.precision!r}: expected auto, bfloat16 or float32")

    def rate(self, step: int) -> float:
        """Learning rate of a step, the first being 0."""
        warmup = self.warmup * self.steps
        if step < warmup:
            return self.learning_rate * (step + 1) / (warmup + 1)
        done = (step - warmup) / max(self.steps - warmup, 1)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One measurement: a row of the curves."""

    step: int
    tokens: int  # trained on so far, prompts and repetitions included
    train_loss: float  # mean since the last measurement
    kind: str  # of the held-out pieces: text or chat
    held_out_loss: float
    acceptance: list[float]  # conditional, by draft position
    mean_length: float  # tokens of a verify step, the bonus included


@dataclass(slots=True)
class _State:
    """How far a run has come."""

    step: int = 0
    tokens: int = 0
    losses: list[float] = field(default_factory=list)  # since the last measurement
    points: list[Point] = field(default_factory=list)


class Trainer:
    """See the module docstring.

    Args:
        draft: on the device that is trained on.
        objective: on the same device.
        cache: of the whole corpus.
        pieces: the corpus.
        config: how.
        device: the device.
    """

    def __init__(
        self,
        draft: Draft,
        objective: Objective,
        cache: HiddenCache,
        pieces: Sequence[Piece],
        *,
        config: TrainConfig,
        device: torch.device,
    ) -> None:
        self._draft = draft
        self._objective = objective
        self._cache = cache
        self._config = config
        self._device = device
        self._train = [index for index, piece in enumerate(pieces) if not piece.held_out]
        self._held_out = {
            kind: [i for i, piece in enumerate(pieces) if piece.held_out and piece.kind == kind]
            for kind in sorted({piece.kind for piece in pieces})
        }
        self._optimizer = DraftOptimizer(draft, weight_decay=config.weight_decay, clip=config.clip)
        self._state = _State()

    def run(
        self,
        path: Path,
        key: str,
        *,
        progress: Progress | None = None,
        measured: Callable[[Sequence[Point]], None] | None = None,
    ) -> list[Point]:
        """Train to the last step, from the checkpoint where there is one.

        Args:
            path: of the checkpoint.
            key: everything that the weights follow from; a checkpoint of another key is refused.
            progress: called with the phase "training" after each step.
            measured: called with all points after each measurement.

        Raises:
            ValueError: the checkpoint is of another key, or cannot be read.
        """
        config, state = self._config, self._state
        if path.exists():
            self._load(path, key)
        lengths = [self._cache.lengths[index] for index in self._train]
        order = batch_order(lengths, config.batch_tokens, config.seed)
        for _ in range(state.step):
            next(order)
        while state.step < config.steps:
            loss = self._step([self._train[index] for index in next(order)])
            if state.step % config.measure_every == 0 or state.step == config.steps:
                self._measure()
                if measured is not None:
                    measured(state.points)
            if state.step % config.save_every == 0 or state.step == config.steps:
                self._save(path, key)
            if progress is not None:
                progress("training", state.step, config.steps, f"loss {loss:.3f}")
        return state.points

    def _step(self, pieces: Sequence[int]) -> float:
        config, state = self._config, self._state
        batch = self._cache.batch(pieces).to(self._device)
        self._draft.train()
        with self._autocast():
            first_only = state.step < config.first_only * config.steps
            loss = self._objective.loss(self._draft, batch, 1 if first_only else None)
        self._optimizer.step(loss, config.rate(state.step))
        state.step += 1
        state.tokens += sum(self._cache.lengths[index] for index in pieces)
        state.losses.append(float(loss.detach()))
        return state.losses[-1]

    def _measure(self) -> None:
        """Add a point for each kind of held-out pieces, and start the mean of the losses anew."""
        state = self._state
        self._draft.eval()
        train_loss = sum(state.losses) / len(state.losses)
        state.losses.clear()
        for kind, pieces in self._held_out.items():
            if pieces:
                loss, acceptance = self._judge(pieces)
                state.points.append(
                    Point(
                        step=state.step,
                        tokens=state.tokens,
                        train_loss=train_loss,
                        kind=kind,
                        held_out_loss=loss,
                        acceptance=acceptance.rates,
                        mean_length=acceptance.mean_length,
                    )
                )

    @torch.no_grad()
    def _judge(self, pieces: Sequence[int]) -> tuple[float, Acceptance]:
        """Loss by batch, and acceptance over all, of these pieces."""
        total = Acceptance([], [])
        losses, batches = (
            0.0,
            in_order([self._cache.lengths[i] for i in pieces], self._config.batch_tokens),
        )
        for indices in batches:
            batch = self._cache.batch([pieces[index] for index in indices]).to(self._device)
            with self._autocast():
                losses += float(self._objective.loss(self._draft, batch))
                total += self._objective.acceptance(self._draft, batch)
        return losses / len(batches), total

    def _autocast(self) -> torch.autocast:
        return torch.autocast(
            self._device.type, torch.bfloat16, enabled=uses_bfloat16(self._config, self._device)
        )

    def _save(self, path: Path, key: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        state = {
            "key": key,
            "state": json.dumps(asdict(self._state)),
            "draft": self._draft.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        try:
            torch.save(state, temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def _load(self, path: Path, key: str) -> None:
        try:
            stored: Any = torch.load(path, map_location=self._device, weights_only=True)
        except UNREADABLE as error:
            raise ValueError(
                f"{path} is no checkpoint that can be read; if it is damaged, delete it to start "
                f"anew: {error}"
            ) from error
        if not isinstance(stored, dict) or stored.get("key") != key:
            raise ValueError(
                f"{path} is the checkpoint of a run with another target, corpus or settings; "
                "repeat them, or give another folder"
            )
        self._draft.load_state_dict(stored["draft"])
        self._optimizer.load_state_dict(stored["optimizer"])
        state = json.loads(stored["state"])
        state["points"] = [Point(**point) for point in state["points"]]
        for name, value in state.items():
            setattr(self._state, name, value)


def uses_bfloat16(config: TrainConfig, device: torch.device) -> bool:
    """Whether matrix products are in bf16; `auto`: where the device has them in hardware."""
    if config.precision != "auto":
        return config.precision == "bfloat16"
    if device.type == "cuda":
        on_gpu: bool = torch.cuda.is_bf16_supported()
        return on_gpu
    on_cpu: bool = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return on_cpu
