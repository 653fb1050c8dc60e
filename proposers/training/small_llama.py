"""A small decoder of the target's vocabulary: a draft model, trained like the heads.

Owns an ordinary Llama as a torch module; parameters are named as in its checkpoints. It reads
tokens only, so that it has no chain to unroll: each row is one prediction.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import nn

from proposers.training.batches import Batch
from proposers.training.heads import Draft
from proposers.training.layers import LlamaLayer, RMSNorm, rotation
from proposers.training.target import LayerSizes

Tensor = torch.Tensor

_EMBEDDING_SCALE = 0.02  # standard deviation; the embedding is the output matrix, too


class SmallLlama(Draft):
    """Llama with tied embeddings.

    Args:
        sizes: of each layer.
        num_layers: how many.
        vocab_size: the target's.
    """

    ahead = 1
    chains = False

    def __init__(self, sizes: LayerSizes, *, num_layers: int, vocab_size: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed_tokens = nn.Embedding(vocab_size, sizes.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=_EMBEDDING_SCALE)
        self.layers = nn.ModuleList([LlamaLayer(sizes) for _ in range(num_layers)])
        self.norm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)

    def unroll(self, batch: Batch, steps: int) -> Iterator[Tensor]:
        """One step, whatever their number."""
        yield self.hidden(batch.token_ids)

    def hidden(self, token_ids: Tensor) -> Tensor:
        """[B, L, hidden] of token ids [B, L] int64, behind the final norm."""
        by = rotation(self.sizes, torch.arange(token_ids.shape[1], device=token_ids.device))
        hidden = self.embed_tokens(token_ids)
        for layer in self.layers:
            hidden = cast(LlamaLayer, layer).run(hidden, by, [])
        normed: Tensor = self.norm(hidden)
        return normed

    def logits(self, rows: Tensor) -> Tensor:
        return nn.functional.linear(rows, self.embed_tokens.weight).float()
