"""Heads over the target's hidden states, as torch modules to train: EAGLE-1, EAGLE-3 and MTP.

Written from the papers: EAGLE (2401.15077), EAGLE-3 (2503.01840), DeepSeek-V3 (2412.19437) with a
dense Llama layer. Parameters are named as in the public checkpoints. All take the embedding of
token t + 1 together with the target's state of position t and predict token t + 2; in later steps
their own output stands in for the target's state. Knows nothing of loss, files or vocabularies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from proposers.training.batches import Batch, shifted
from proposers.training.layers import Chain, Layer, LlamaLayer, RMSNorm, Rotation, rotation
from proposers.training.target import LayerSizes, Target

Tensor = torch.Tensor


class Draft(nn.Module, ABC):
    """What can be trained.

    Attributes:
        ahead: row a of step s predicts token a + s + ahead.
        chains: whether later steps go on from the own output; if not there is one step, whose row
            a + s is what a draft of s + 1 tokens ends with.
    """

    ahead = 2
    chains = True

    @abstractmethod
    def unroll(self, batch: Batch, steps: int) -> Iterator[Tensor]:
        """Rows [B, L, hidden] of each step in turn, ready for `logits`."""

    @abstractmethod
    def logits(self, rows: Tensor) -> Tensor:
        """[N, draft vocabulary] fp32 of rows [N, hidden]."""


class Head(Draft):
    """The recurrence that the heads share.

    Args:
        sizes: of the head's layer.
        embed: [vocab, hidden], the target's, which is not trained.
    """

    target_embed: Tensor

    def __init__(self, sizes: LayerSizes, embed: Tensor) -> None:
        super().__init__()
        self.sizes = sizes
        self.register_buffer("target_embed", embed, persistent=False)

    def unroll(self, batch: Batch, steps: int) -> Iterator[Tensor]:
        """Row a is the chain that starts behind the target's state of position a.

        Tokens are the text's own, which in decoding a chain has only drafted: what it does behind a
        draft that was wrong is of no use to anybody.
        """
        chain: Chain = []
        state = self.first_state(batch)
        positions = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device)
        for step in range(steps):
            token_ids = shifted(batch.token_ids, step + 1)
            embeds = functional.embedding(token_ids, self.target_embed).float()
            by = rotation(self.sizes, positions + step)
            rows, state = self.step(embeds, state, by, chain)
            yield rows

    @abstractmethod
    def first_state(self, batch: Batch) -> Tensor:
        """[B, L, hidden] of the target's states."""

    @abstractmethod
    def step(
        self, embeds: Tensor, state: Tensor, by: Rotation, chain: Chain
    ) -> tuple[Tensor, Tensor]:
        """Rows for `logits`, and the state that the next step takes, all [B, L, hidden]."""


class Eagle1(Head):
    """EAGLE-1: one layer that norms no input, between two of the target's own matrices."""

    target_head: Tensor

    def __init__(self, target: Target, sizes: LayerSizes) -> None:
        super().__init__(sizes, target.embed)
        self.fc = nn.Linear(2 * sizes.hidden_size, sizes.hidden_size, bias=False)
        self.layers = nn.ModuleList([Layer(sizes, sizes.hidden_size)])
        self.register_buffer("target_head", target.lm_head, persistent=False)

    def first_state(self, batch: Batch) -> Tensor:
        return batch.final

    def step(
        self, embeds: Tensor, state: Tensor, by: Rotation, chain: Chain
    ) -> tuple[Tensor, Tensor]:
        mixed = self.fc(torch.cat((embeds, state), dim=-1)).float()
        output: Tensor = self.layers[0](mixed, mixed, by, chain)
        return output, output

    def logits(self, rows: Tensor) -> Tensor:
        return functional.linear(rows, self.target_head.to(rows.dtype)).float()


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Flags:
    """What the format can vary.

    Attributes:
        fc_norm: each of the target's states passes a norm of its own before they are mixed.
        norm_before_residual: what the layer adds to is the normed state.
        norm_output: what is fed back is the normed output.
    """

    fc_norm: bool = False
    norm_before_residual: bool = True
    norm_output: bool = False


class Eagle3Layer(Layer):
    """Attention over the normed embedding beside the normed state, added to the state.

    Args:
        norm_before_residual: what is added to is the normed state.
    """

    def __init__(self, sizes: LayerSizes, *, norm_before_residual: bool) -> None:
        super().__init__(sizes, 2 * sizes.hidden_size)
        self.input_layernorm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.hidden_norm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self._norm_before_residual = norm_before_residual

    def run(self, embeds: Tensor, state: Tensor, by: Rotation, chain: Chain) -> Tensor:
        normed = self.hidden_norm(state)
        residual = normed if self._norm_before_residual else state
        x = torch.cat((self.input_layernorm(embeds), normed), dim=-1)
        output: Tensor = self(residual, x, by, chain)
        return output


class Eagle3(Head):
    """EAGLE-3: states of several layers, and a head of its own over a draft vocabulary.

    Args:
        target: what is drafted for.
        sizes: of the layer.
        num_taps: how many of the target's states there are.
        draft_ids: int64 [draft vocabulary], the target's ids.
        flags: those of the format, see there.
    """

    def __init__(
        self,
        target: Target,
        sizes: LayerSizes,
        *,
        num_taps: int,
        draft_ids: Tensor,
        flags: Eagle3Flags,
    ) -> None:
        super().__init__(sizes, target.embed)
        hidden = sizes.hidden_size
        self.fc_norm = nn.ModuleList(
            [RMSNorm(hidden, sizes.rms_norm_eps) for _ in range(num_taps if flags.fc_norm else 0)]
        )
        self.fc = nn.Linear(num_taps * hidden, hidden, bias=False)
        layer = Eagle3Layer(sizes, norm_before_residual=flags.norm_before_residual)
        self.layers = nn.ModuleList([layer])
        self.norm = RMSNorm(hidden, sizes.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, len(draft_ids), bias=False)
        self._norm_output = flags.norm_output
        with torch.no_grad():  # the target's own rows are where the head's would end up
            self.norm.weight.copy_(target.final_norm)
            self.lm_head.weight.copy_(target.lm_head[draft_ids])

    def first_state(self, batch: Batch) -> Tensor:
        aux = batch.aux
        if self.fc_norm:
            parts = aux.chunk(len(self.fc_norm), dim=-1)
            pairs = zip(self.fc_norm, parts, strict=True)
            aux = torch.cat([norm(part) for norm, part in pairs], dim=-1)
        state: Tensor = self.fc(aux).float()
        return state

    def step(
        self, embeds: Tensor, state: Tensor, by: Rotation, chain: Chain
    ) -> tuple[Tensor, Tensor]:
        output = cast(Eagle3Layer, self.layers[0]).run(embeds, state, by, chain)
        normed = self.norm(output)
        return normed, normed if self._norm_output else output

    def logits(self, rows: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(rows).float()
        return logits


class MtpLayer(LlamaLayer):
    """A multi-token-prediction layer under MiMo's names."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__(sizes)
        hidden = sizes.hidden_size
        self.token_layernorm = RMSNorm(hidden, sizes.rms_norm_eps)
        self.hidden_layernorm = RMSNorm(hidden, sizes.rms_norm_eps)
        self.input_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.final_layernorm = RMSNorm(hidden, sizes.rms_norm_eps)


class Mtp(Head):
    """Multi-token prediction: one layer, used for every step, which feeds its normed output back.

    As MiMo does, the state comes before the embedding, and position 0 has no embedding.
    """

    target_head: Tensor

    def __init__(self, target: Target, sizes: LayerSizes) -> None:
        super().__init__(sizes, target.embed)
        layer = MtpLayer(sizes)
        self.mtp_layers = nn.ModuleList([layer])
        self.register_buffer("target_head", target.lm_head, persistent=False)
        with torch.no_grad():
            layer.final_layernorm.weight.copy_(target.final_norm)

    def first_state(self, batch: Batch) -> Tensor:
        return batch.final

    def step(
        self, embeds: Tensor, state: Tensor, by: Rotation, chain: Chain
    ) -> tuple[Tensor, Tensor]:
        layer = cast(MtpLayer, self.mtp_layers[0])
        if not chain:  # later steps never stand at position 0
            embeds = torch.cat((torch.zeros_like(embeds[:, :1]), embeds[:, 1:]), dim=1)
        parts = (layer.hidden_layernorm(state), layer.token_layernorm(embeds))
        mixed = layer.input_proj(torch.cat(parts, dim=-1)).float()
        output: Tensor = layer.final_layernorm(layer.run(mixed, by, chain))
        return output, output

    def logits(self, rows: Tensor) -> Tensor:
        return functional.linear(rows, self.target_head.to(rows.dtype)).float()
