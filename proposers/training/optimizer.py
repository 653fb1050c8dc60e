"""The optimiser of a draft: Muon for the matrices inside it, AdamW for the rest.

Muon makes each update of a matrix orthogonal, which here takes half of AdamW's steps. Updates are
scaled to the size of AdamW's (2502.16982), so one learning rate serves both. Rows of a vocabulary
are each learnt on their own, so embeddings and output heads are AdamW's, and so are norms. Knows
nothing of losses or batches.
"""

from __future__ import annotations

from typing import Any

import torch

from proposers.training.heads import Draft

_MUON_RATE = 2.0  # of the learning rate
_VOCABULARY_MATRICES = ("lm_head.weight", "embed_tokens.weight")


class DraftOptimizer:
    """See the module docstring.

    Args:
        draft: whose parameters are updated.
        weight_decay: of matrices.
        clip: largest norm of all gradients together.
    """

    def __init__(self, draft: Draft, *, weight_decay: float, clip: float) -> None:
        inner, vocabulary, norms = [], [], []
        for name, parameter in draft.named_parameters():
            if parameter.dim() < 2:
                norms.append(parameter)
            elif name.endswith(_VOCABULARY_MATRICES):
                vocabulary.append(parameter)
            else:
                inner.append(parameter)
        self._parameters = [*inner, *vocabulary, *norms]
        self._clip = clip
        self._parts: dict[str, torch.optim.Optimizer] = {
            "muon": torch.optim.Muon(
                inner, weight_decay=weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
            ),
            "adamw": torch.optim.AdamW(
                [
                    {"params": vocabulary, "weight_decay": weight_decay},
                    {"params": norms, "weight_decay": 0.0},
                ],
                betas=(0.9, 0.95),
                fused=True,
            ),
        }

    def step(self, loss: torch.Tensor, learning_rate: float) -> None:
        """One update against the gradients of a loss."""
        for name, part in self._parts.items():
            part.zero_grad()
            for group in part.param_groups:
                group["lr"] = learning_rate * (_MUON_RATE if name == "muon" else 1.0)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, self._clip)
        for part in self._parts.values():
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` goes on from."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
