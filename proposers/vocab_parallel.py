"""Greedy drafts over a vocabulary that is split across ranks: two numbers a rank cross the wire.

Each rank finds the largest logit of its shard and the token's id; all ranks exchange these pairs
and come to the same token, with ties to the lowest id as everywhere. The alternative, gathering the
logits, moves the vocabulary instead of `2 x tp_size` numbers a request. For engines that split the
head; the CPU engine has one rank and calls none of this.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

Tensor = torch.Tensor


def shard_range(vocab_size: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Rows [start, end) of the head that a rank holds; the last shard may be short, or empty."""
    size = -(-vocab_size // num_ranks)
    return min(rank * size, vocab_size), min((rank + 1) * size, vocab_size)


def shard_best(logits: Tensor, start: int) -> Tensor:
    """The largest logit of each row and the token that has it: [num_rows, 2] float64.

    Args:
        logits: [num_rows, shard_size], of tokens start, start + 1, ... NaN never wins; a row
            without a number gives -inf and the shard's first token.
        start: token id of the first column.
    """
    if logits.shape[1] == 0:
        return torch.tensor([float("-inf"), start], dtype=torch.float64).repeat(len(logits), 1)
    known = torch.where(logits.isnan(), float("-inf"), logits)
    largest = known.amax(-1, keepdim=True)
    columns = torch.arange(logits.shape[1], device=logits.device)
    first = torch.where(known == largest, columns, logits.shape[1]).amin(-1)
    return torch.stack([largest[:, 0].double(), (first + start).double()], dim=1)


def best_of_shards(pairs: Tensor) -> Tensor:
    """Token ids [num_rows] int32 of pairs [num_ranks, num_rows, 2]; ties go to the lowest id."""
    values, tokens = pairs[..., 0], pairs[..., 1]
    wins = values == values.amax(0, keepdim=True)
    return torch.where(wins, tokens, float("inf")).amin(0).int()


def vocab_parallel_argmax(logits: Tensor, start: int, group: dist.ProcessGroup) -> Tensor:
    """Token ids [num_rows] int32 with the largest logit over all ranks' shards; the same on each.

    Args:
        logits: [num_rows, shard_size] of this rank; num_rows is the same everywhere.
        start: token id of this rank's first column.
        group: of the ranks that share the head.
    """
    mine = shard_best(logits, start)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    return best_of_shards(torch.stack(gathered))
