"""Hidden states on disk: the target runs over a corpus once, training reads its rows many times.

Owns the files: shards of some pieces each, as safetensors, written beside their place and moved
there, so that a run that was stopped redoes one shard at most. They lie in a folder named after
target, taps and corpus; another of these is another folder. Reading maps the files into memory.
Logits are never kept: training computes those it needs from the last hidden states.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
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


class HiddenCache:
    """The rows of a corpus, by piece.

    Args:
        folder: of one target, taps and corpus; all its shards are there.
        pieces: the corpus.
    """

    def __init__(self, folder: Path, pieces: Sequence[Piece]) -> None:
        self._starts = np.zeros(len(pieces), dtype=np.int64)  # of a piece's rows in its shard
        self.lengths = [len(piece.token_ids) for piece in pieces]
        self._shards: list[Any] = []
        for shard in range(0, len(pieces), _SHARD_PIECES):
            lengths = self.lengths[shard : shard + _SHARD_PIECES]
            self._starts[shard + 1 : shard + len(lengths)] = np.cumsum(lengths)[:-1]
            path = folder / _shard_name(shard)
            self._shards.append(safe_open(path, framework="pt"))

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
        shard, start = self._shards[piece // _SHARD_PIECES], int(self._starts[piece])
        rows = slice(start, start + self.lengths[piece])
        return {name: shard.get_slice(name)[rows] for name in shard.keys()}  # noqa: SIM118


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
    folder = root / cache_key(target, teacher.taps, pieces)
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(0, len(pieces), _SHARD_PIECES):
        part = pieces[shard : shard + _SHARD_PIECES]
        if not (folder / _shard_name(shard)).exists():
            _write_shard(folder / _shard_name(shard), teacher, part)
        if progress is not None:
            progress("hidden states", shard + len(part), len(pieces), "pieces")
    return HiddenCache(folder, pieces)


def cache_key(target: Target, taps: Sequence[int], pieces: Sequence[Piece]) -> str:
    """Name of the folder: changes with anything that changes a row."""
    about = [_FORMAT, target.fingerprint, list(taps), corpus_digest(pieces)]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:20]


def _shard_name(first_piece: int) -> str:
    return f"{first_piece // _SHARD_PIECES:05d}.safetensors"


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
