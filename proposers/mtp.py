"""mtp: drafts by layers that were trained to predict further tokens (DeepSeek-V3, 2412.19437).

Layer s (from 0) sits in slot i with the state of layer s - 1 there (s = 0: the target's, behind its
final norm) and the embedding of token i + 1 + s, and predicts token i + 2 + s (eq. 21 to 23). So
all layers run over the same window of slots, each with tokens one further on, the last of which
have only been drafted. Once they are used up the last one goes on, slot by slot, from its own
state. What is handed on, and what the head reads, is the normed output.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from capture.buffers import BufferSpec
from proposers.chain import chain_buffers, scratch
from proposers.device import FINAL, Activations, DraftPlan, DraftRuntime, DraftSite, KVShape, Rows
from proposers.info import ProposerInfo, ProposerSpec
from proposers.model_based import ModelBasedProposer, Views
from proposers.mtp_weights import OpenedMtp, open_mtp

Tensor = torch.Tensor
logger = logging.getLogger(__name__)


class MtpProposer(ModelBasedProposer):
    """See the module docstring.

    Args:
        runtime: of the engine.
        opened: the layers; their weights are read here.
    """

    name = "mtp"
    needs_hidden_states = True
    needs_tokens = False
    suspects = (
        "the family of the layers (its norms, the order of concatenation), their output head, or "
        "layers of another target"
    )

    def __init__(self, runtime: DraftRuntime, opened: OpenedMtp) -> None:
        super().__init__(
            runtime,
            shift=1,
            lookahead=opened.num_layers,
            max_len=opened.architecture.max_position_embeddings,
            num_embeddings=runtime.vocab_size,
            rms_norm_eps=opened.architecture.rms_norm_eps,
        )
        self._opened, self._family = opened, opened.config.family
        self._layers = opened.load(runtime)
        self._head = self._layers[0].head

    def variants(self) -> Iterator[tuple[str, ModelBasedProposer]]:
        """What families differ in, turned round, and the target's head."""
        for flag, name in (
            ("hidden_first", "order of concatenation"),
            ("norms_add_one", "norm (1 + weight)"),
        ):
            turned: dict[str, Any] = {flag: not getattr(self._family, flag)}
            config = replace(self._opened.config, family=replace(self._family, **turned))
            yield name, MtpProposer(self.runtime, replace(self._opened, config=config))
        if self._opened.config.has_head:
            yield "head", MtpProposer(self.runtime, self._opened).borrowing()

    def borrowing(self) -> MtpProposer:
        """Itself, with the target's output head."""
        self._head = self.runtime.target_head
        return self

    def width(self, k: int) -> int:
        """What a step can have verified, and the slots whose deeper tokens were drafts then."""
        return k + len(self._layers)

    def num_loop_rows(self, allowance: int, k: int) -> int:
        """Those that the last layer goes on from; the others are in the window."""
        return max(allowance - len(self._layers), 0)

    def extend(self, views: Views, rows: Rows, activations: Activations) -> Tensor:
        self.ops.load_slots(views["draft.behind"], rows.slot_mapping)
        self._forward(0, views, rows, activations, views["draft.behind"])
        return views["draft.behind"]

    def deepen(self, depth: int, views: Views, rows: Rows, activations: Activations) -> Tensor:
        self._forward(depth, views, rows, activations, views["draft.behind"])
        return views["draft.behind"]

    def advance(self, step: int, views: Views, window: Views) -> None:
        """The next layer over the same window; behind the last layer, the next slot."""
        depth = step + 1
        if depth >= len(self._layers):
            super().advance(depth - len(self._layers), views, window)
            return
        tokens, last_rows = window["draft.shifted"], views["draft.last_rows"]
        before = window["token_ids"] if depth == 1 else tokens
        self.ops.shift_tokens(tokens, before, last_rows, views["draft.chosen"])
        rows = self.runtime.rows(
            tokens,
            window["positions"],
            window["slot_mapping"],
            window["block_table"],
            window["query_start_loc"],
        )
        behind = self.deepen(depth, window, rows, self.runtime.activations(window, len(tokens)))
        self.ops.take_rows(views["draft.state"], behind, last_rows)

    def step(self, views: Views, rows: Rows, activations: Activations, state: Tensor) -> None:
        self._forward(len(self._layers) - 1, views, rows, activations, state)

    def logits(self, out: Tensor, state: Tensor, activations: Activations) -> None:
        self.ops.linear(out, state, self._head)

    def _forward(
        self, depth: int, views: Views, rows: Rows, activations: Activations, state: Tensor
    ) -> None:
        """One layer: state [T, hidden] in, the normed output in its place."""
        ops, layer = self.ops, self._layers[depth]
        hidden, normed = activations.hidden, activations.normed
        embedded, joined = (views[f"draft.{name}"][: len(state)] for name in ("embedded", "joined"))
        ops.embed(embedded, layer.embedding, rows.token_ids)
        if self._family.zero_first:
            ops.zero_first(embedded, rows.positions)
        ops.rms_norm(embedded, embedded, layer.embed_norm)
        ops.rms_norm(normed, state, layer.hidden_norm)
        parts = (normed, embedded) if self._family.hidden_first else (embedded, normed)
        ops.concat(joined, *parts)
        ops.linear(hidden, joined, layer.projection)
        ops.rms_norm(normed, hidden, layer.block.input_norm)
        layer.block.attend(normed, rows, activations)
        layer.block.feed_forward(activations)
        ops.rms_norm(state, hidden, layer.final_norm)


def _open(options: Mapping[str, object], site: DraftSite) -> DraftPlan:
    opened = open_mtp(site)
    architecture, num_layers = opened.architecture, opened.num_layers
    hidden, vocab_size = architecture.hidden_size, site.target.vocab_size
    if 1 < num_layers < site.max_draft_tokens:
        logger.warning(
            "proposer mtp: the checkpoint has %d layers and max_draft_tokens is %d; what follows "
            "draft %d is drafted by the last layer over again, which was not trained for that",
            num_layers,
            site.max_draft_tokens,
            num_layers,
        )
    kv = KVShape(num_kv_heads=architecture.num_kv_heads, head_dim=architecture.head_dim)
    return DraftPlan(
        kv_layers=(kv,) * num_layers,
        taps=(FINAL,),
        lookahead=num_layers,
        num_weight_bytes=opened.num_bytes,
        buffers=(
            *chain_buffers(
                architecture,
                vocab_size=vocab_size,
                target_vocab=vocab_size,
                draft_sampling=site.draft_sampling,
            ),
            scratch("embedded", hidden),
            scratch("joined", 2 * hidden),
            scratch("behind", hidden),
            BufferSpec(
                name="draft.shifted",
                shape=("T",),
                dtype=torch.int32,
                role="scratch",
            ),
        ),
        build=lambda runtime: MtpProposer(runtime, opened),
    )


SPEC = ProposerSpec(
    info=ProposerInfo(
        name=MtpProposer.name,
        summary="the checkpoint's own multi-token-prediction layers",
        kind="device",
        graph_safe=True,
        needs_hidden_states=True,
        produces_probs=True,
        needs_tokens=False,
        model="optional",
    ),
    open=_open,
)
