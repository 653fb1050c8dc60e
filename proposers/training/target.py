"""What training knows of the model that a draft is for: sizes, two matrices, and a teacher.

Owns the values that cross from the engine to training, so that nothing here imports it. Knows
nothing of checkpoints, caches or how the teacher computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSizes:
    """A Llama layer's sizes; the rotation is plain, with this base."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Target:
    """The model that is drafted for.

    Attributes:
        name: as the user named it; written into configs.
        fingerprint: changes where any weight does; what is cached is kept under it.
        architecture: class name of its checkpoint, such as `LlamaForCausalLM`.
        eos_token_ids: what ends its texts.
    """

    name: str
    fingerprint: str
    architecture: str
    sizes: LayerSizes
    num_layers: int
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    embed: Tensor  # [vocab, hidden]
    final_norm: Tensor  # [hidden]
    lm_head: Tensor  # [vocab, hidden]

    def to(self, device: torch.device) -> Target:
        """The same with its matrices on a device."""
        names = ("embed", "final_norm", "lm_head")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


@dataclass(frozen=True, slots=True, eq=False)
class TeacherRows:
    """What the target computes at each position of a text."""

    aux: Tensor  # [T, len(taps) * hidden], residual streams side by side
    final: Tensor  # [T, hidden], the last one behind the final norm
    greedy_ids: Tensor  # [T] int32, the likeliest next token


class Teacher(Protocol):
    """The target, run over whole texts."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Whose residual streams are `aux`: the one after `t` layers for each `t`."""

    def run(self, token_ids: Sequence[int]) -> TeacherRows:
        """All rows of one text, on the host, of any float dtype; valid until the next call."""
