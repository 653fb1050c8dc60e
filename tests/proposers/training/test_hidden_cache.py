"""Hidden states on disk: what the target computed, kept through an interrupt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from proposers.training import TeacherRows
from proposers.training.hidden_cache import build_cache
from tests.proposers.training.conftest import Taught

Teach = Callable[[tuple[int, ...]], Taught]


class Counting:
    """A teacher that counts its texts, and stops before one of them."""

    def __init__(self, taught: Taught, stop: int | None = None) -> None:
        self.taught, self.stop, self.texts = taught, stop, 0
        self.taps = taught.teacher.taps

    def run(self, token_ids: Sequence[int]) -> TeacherRows:
        if self.texts == self.stop:
            raise KeyboardInterrupt
        self.texts += 1
        return self.taught.teacher.run(token_ids)


@pytest.mark.parametrize("taps", [(0, 1, 2), ()])
def test_rows_are_the_teachers(tmp_path: Path, teach: Teach, taps: tuple[int, ...]) -> None:
    """Guards rows of a neighbour, padding that counts, and a draft that needs no taps."""
    taught = teach(taps)
    cache = build_cache(tmp_path, taught.target, taught.teacher, taught.pieces)
    assert len(taught.pieces) > 64  # more than a shard
    chosen = [len(taught.pieces) - 1, 0, 63, 64]
    batch = cache.batch(chosen)
    for row, index in enumerate(chosen):
        piece = taught.pieces[index]
        length = len(piece.token_ids)
        rows = taught.teacher.run(piece.token_ids.tolist())
        assert batch.token_ids[row, :length].tolist() == piece.token_ids.tolist()
        assert batch.counts[row].sum() == length - piece.first
        assert not batch.counts[row, length:].any()
        assert torch.equal(batch.greedy_ids[row, :length].int(), rows.greedy_ids)
        assert torch.equal(batch.final[row, :length], rows.final.bfloat16())
        assert torch.equal(batch.aux[row, :length], rows.aux.bfloat16())
        assert not batch.final[row, length:].any()


def test_an_interrupted_run_redoes_one_shard(tmp_path: Path, teach: Teach) -> None:
    """Guards half a shard that is taken for a whole one, and an hour's work done twice."""
    taught = teach((1,))
    with pytest.raises(KeyboardInterrupt):
        build_cache(tmp_path, taught.target, Counting(taught, stop=70), taught.pieces)
    again = Counting(taught)
    cache = build_cache(tmp_path, taught.target, again, taught.pieces)
    assert again.texts == len(taught.pieces) - 64
    assert cache.lengths == [len(piece.token_ids) for piece in taught.pieces]
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".safetensors"}
    third = Counting(taught)
    build_cache(tmp_path, taught.target, third, taught.pieces)
    assert third.texts == 0


def test_a_corpus_that_grows_keeps_its_shards(tmp_path: Path, teach: Teach) -> None:
    """Guards hours of the target's work that are thrown away for a few more chats."""
    taught = teach((1,))
    texts = taught.pieces[:70]
    chats = [replace(piece, kind="chat") for piece in taught.pieces[70:] + taught.pieces[:64]]
    build_cache(tmp_path, taught.target, taught.teacher, [*texts, *chats[:64]])
    again = Counting(taught)
    cache = build_cache(tmp_path, taught.target, again, [*texts, *chats])
    assert again.texts == len(chats) - 64
    batch = cache.batch([len(texts) + len(chats) - 1])
    assert batch.token_ids[0].tolist() == chats[-1].token_ids.tolist()


@pytest.mark.parametrize("change", ["fingerprint", "taps", "text", "prompt"])
def test_other_rows_are_not_taken_for_these(tmp_path: Path, teach: Teach, change: str) -> None:
    """Guards states of another target, layer, text or mask."""
    taught, other = teach((1,)), teach((2,))
    build_cache(tmp_path, taught.target, taught.teacher, taught.pieces)
    target, pieces = taught.target, list(taught.pieces)
    if change == "fingerprint":
        target = replace(target, fingerprint="another")
    if change == "text":
        pieces[3] = replace(pieces[3], token_ids=pieces[3].token_ids + 1)
    if change == "prompt":
        pieces[3] = replace(pieces[3], first=2)
    again = Counting(other if change == "taps" else taught)
    build_cache(tmp_path, target, again, pieces)
    assert again.texts == (64 if change in ("text", "prompt") else len(pieces))
