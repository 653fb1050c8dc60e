"""The vocabulary-parallel argmax: that of the whole row, over two real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from proposers.vocab_parallel import (
    best_of_shards,
    shard_best,
    shard_range,
    vocab_parallel_argmax,
)

NUM_ROWS, NUM_RANKS = 64, 2


def make_logits(vocab_size: int) -> torch.Tensor:
    """Rows with planted ties across shards, NaN, -inf and nothing at all."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randint(-3, 4, (NUM_ROWS, vocab_size), generator=generator).float()
    logits[1, ::2] = float("nan")
    logits[2] = float("-inf")
    logits[3, : vocab_size // 2] = float("-inf")
    logits[4] = 7.0
    return logits


def whole_argmax(logits: torch.Tensor) -> list[int]:
    """Lowest id of the largest number of each row, by a plain loop."""
    found = []
    for row in logits.tolist():
        known = [x if x == x else float("-inf") for x in row]
        found.append(known.index(max(known)))
    return found


@pytest.mark.parametrize("vocab_size", [1, 2, 5, 64, 65])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_shards_give_the_argmax_of_the_whole(vocab_size: int, num_ranks: int) -> None:
    """Guards case 51: a vocabulary that does not divide, shards that are empty, ties."""
    logits = make_logits(vocab_size)
    pairs, covered = [], 0
    for rank in range(num_ranks):
        start, end = shard_range(vocab_size, rank, num_ranks)
        covered += end - start
        pairs.append(shard_best(logits[:, start:end], start))
    assert covered == vocab_size
    assert best_of_shards(torch.stack(pairs)).tolist() == whole_argmax(logits)


def rank_main(rank: int, folder: str, vocab_size: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=NUM_RANKS
    )
    start, end = shard_range(vocab_size, rank, NUM_RANKS)
    logits = make_logits(vocab_size)[:, start:end].contiguous()
    sent: list[int] = []
    real = dist.all_gather

    def counting(into: list[torch.Tensor], mine: torch.Tensor, group: object = None) -> object:
        sent.append(mine.numel())
        return real(into, mine, group=group)

    dist.all_gather = counting
    group = dist.new_group(list(range(NUM_RANKS)))
    ids = vocab_parallel_argmax(logits, start, group)
    assert sent == [2 * NUM_ROWS], f"{sent} numbers sent, not 2 a request"
    torch.save(ids, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_agree_on_the_token_of_the_whole_row(tmp_path: Path) -> None:
    """Guards case 50: the collective is of a fixed width, and both ranks have the same tokens."""
    mp.spawn(rank_main, args=(str(tmp_path), 65), nprocs=NUM_RANKS)
    ids = [torch.load(tmp_path / f"{rank}.pt").tolist() for rank in range(NUM_RANKS)]
    assert ids[0] == ids[1] == whole_argmax(make_logits(65))
