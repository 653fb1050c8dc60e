"""Hidden states on disk: the target runs over a corpus once, training reads its rows many times.

Owns the files: shards of some pieces each, as safetensors, written beside their place and moved
there, so that a run that was stopped redoes one shard at most. Each is named after what is in it,
in a folder named after target and taps: a corpus that grows keeps what it has. Reading maps the
files into memory. Logits are never kept: training computes those it needs from the last hidden
states.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence

from proposers.training.batches import Batch
from proposers.training.corpus import Piece, corpus_digest
from proposers.training.target import Target, Teacher

Tensor = torch.Tensor
Progress = Callable[[str, int, int, str], None]  # phase, done, total, what

_SHARD_PIECES = 64
_FORMAT = 1  # of the shards; goes into the folder's name


@dataclass(frozen=True, slots=True)
class _Shard:
    """Some pieces that follow each other in the corpus."""

    name: str
    pieces: Sequence[Piece]


class HiddenCache:
    """The rows of a corpus, by piece.

    Args:
        folder: of one target and taps; all shards of the corpus are there.
        pieces: the corpus.
    """

    def __init__(self, folder: Path, pieces: Sequence[Piece]) -> None:
        self.lengths = [len(piece.token_ids) for piece in pieces]
        self._places: list[tuple[Any, slice]] = []  # of each piece: its file, and its rows there
        for shard in _shards(pieces):
            file, end = safe_open(folder / shard.name, framework="pt"), 0
            for piece in shard.pieces:
                start, end = end, end + len(piece.token_ids)
                self._places.append((file, slice(start, end)))

    def batch(self, pieces: Sequence[int]) -> Batch:
        """These pieces' rows, side by side; hidden states are bf16."""
        rows = [self._rows(piece) for piece in pieces]
        padded = {
            name: pad_sequence([row[name] for row in rows], batch_first=True) for name in rows[0]
        }
        return Batch(
            token_ids=padded["token_ids"].long(),
            counts=padded["counts"],
            greedy_ids=padded["greedy_ids"].long(),
            aux=padded["aux"],
            final=padded["final"],
        )

    def _rows(self, piece: int) -> dict[str, Tensor]:
        file, rows = self._places[piece]
        return {name: file.get_slice(name)[rows] for name in file.keys()}  # noqa: SIM118


def build_cache(
    root: Path,
    target: Target,
    teacher: Teacher,
    pieces: Sequence[Piece],
    progress: Progress | None = None,
) -> HiddenCache:
    """Run the target over what is not there yet.

    Args:
        root: folder of all caches; made where it is missing.
        pieces: the corpus, at least one.
        progress: called with the phase "hidden states" after each shard.

    Raises:
        OSError: the disk is full, or may not be written.
    """
    about = [_FORMAT, target.fingerprint, list(teacher.taps)]
    folder = root / hashlib.sha256(json.dumps(about).encode()).hexdigest()[:20]
    folder.mkdir(parents=True, exist_ok=True)
    done = 0
    for shard in _shards(pieces):
        if not (folder / shard.name).exists():
            _write_shard(folder / shard.name, teacher, shard.pieces)
        done += len(shard.pieces)
        if progress is not None:
            progress("hidden states", done, len(pieces), "pieces")
    return HiddenCache(folder, pieces)


def _shards(pieces: Sequence[Piece]) -> Iterator[_Shard]:
    """Pieces of one kind together, so that text and chats grow apart from each other."""
    for _, group in groupby(pieces, key=lambda piece: piece.kind):
        same = list(group)
        for start in range(0, len(same), _SHARD_PIECES):
            part = same[start : start + _SHARD_PIECES]
            yield _Shard(f"{corpus_digest(part)[:20]}.safetensors", part)


def _write_shard(path: Path, teacher: Teacher, pieces: Sequence[Piece]) -> None:
    parts: dict[str, list[Tensor]] = {
        name: [] for name in ("token_ids", "counts", "greedy_ids", "aux", "final")
    }
    for piece in pieces:
        rows = teacher.run(piece.token_ids.tolist())
        counts = torch.arange(len(piece.token_ids)) >= piece.first
        parts["token_ids"].append(torch.from_numpy(piece.token_ids))
        parts["counts"].append(counts)
        parts["greedy_ids"].append(rows.greedy_ids.clone())
        parts["aux"].append(rows.aux.to(torch.bfloat16, copy=True))
        parts["final"].append(rows.final.to(torch.bfloat16, copy=True))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file({name: torch.cat(rows) for name, rows in parts.items()}, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
