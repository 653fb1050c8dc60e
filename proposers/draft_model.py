"""draft_model: drafts by a smaller decoder of the target's vocabulary (Leviathan et al. 2023).

The forward is the engine's own decoder over draft KV caches. Any checkpoint that the engine serves
will do, as long as its tokenizer is the target's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from proposers.chain import chain_buffers
from proposers.device import (
    Activations,
    DraftDecoder,
    DraftPlan,
    DraftRuntime,
    DraftSite,
    KVShape,
    OpenedDecoder,
    Rows,
)
from proposers.info import ProposerInfo, ProposerSpec
from proposers.model_based import ModelBasedProposer, Views

Tensor = torch.Tensor


class DraftModelProposer(ModelBasedProposer):
    """See the module docstring.

    Args:
        runtime: of the engine.
        opened: the draft model; its weights are read here.
    """

    name = "draft_model"
    needs_tokens = False

    def __init__(self, runtime: DraftRuntime, opened: OpenedDecoder) -> None:
        super().__init__(
            runtime,
            shift=0,
            lookahead=0,
            max_len=opened.architecture.max_position_embeddings,
            num_embeddings=opened.architecture.vocab_size,
            rms_norm_eps=opened.architecture.rms_norm_eps,
        )
        self._decoder: DraftDecoder = opened.load(runtime)

    def width(self, k: int) -> int:
        """Two: the token that verification added, and the last draft where all were accepted."""
        return 2

    def num_kept_drafts(self, allowance: int, k: int) -> int:
        """All that were run on: an accepted draft's row is that of the verified token."""
        return min(allowance, k - 1)

    def extend(self, views: Views, rows: Rows, activations: Activations) -> Tensor:
        self._decoder.forward(rows, activations)
        state: Tensor = activations.hidden
        return state

    def step(self, views: Views, rows: Rows, activations: Activations, state: Tensor) -> None:
        self._decoder.forward(rows, activations.with_hidden(state))

    def logits(self, out: Tensor, state: Tensor, activations: Activations) -> None:
        self._decoder.logits(out, state, activations.normed)


def _open(options: Mapping[str, object], site: DraftSite) -> DraftPlan:
    opened = site.open_decoder()
    draft, target = opened.architecture, site.target
    return DraftPlan(
        kv_layers=(KVShape(num_kv_heads=draft.num_kv_heads, head_dim=draft.head_dim),)
        * draft.num_layers,
        num_weight_bytes=opened.num_weight_bytes,
        buffers=tuple(
            chain_buffers(
                draft,
                vocab_size=min(draft.vocab_size, target.vocab_size),
                target_vocab=target.vocab_size,
                draft_sampling=site.draft_sampling,
            )
        ),
        build=lambda runtime: DraftModelProposer(runtime, opened),
    )


SPEC = ProposerSpec(
    info=ProposerInfo(
        name=DraftModelProposer.name,
        summary="a smaller model of the same vocabulary",
        kind="device",
        graph_safe=True,
        produces_probs=True,
        needs_tokens=False,
        model="required",
    ),
    open=_open,
)
