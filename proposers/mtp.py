"""mtp: drafts by layers that were trained to predict further tokens (DeepSeek-V3, 2412.19437).

Layer s (from 0) sits in slot i with the state of layer s - 1 there (s = 0: the target's, behind its
final norm) and the embedding of token i + 1 + s, and predicts token i + 2 + s (eq. 21 to 23). So
all layers run over the same window of slots, each with tokens one further on, the last of which
have only been drafted. Once they are used up the last one goes on, slot by slot, from its own
state. What is handed on, and what the head reads, is the normed output.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

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

    def __init__(self, runtime: DraftRuntime, opened: OpenedMtp) -> None:
        num_layers = opened.num_layers
        super().__init__(
            runtime,
            shift=1,
            lookahead=num_layers,
            max_len=opened.architecture.max_position_embeddings,
            num_embeddings=runtime.vocab_size,
            rms_norm_eps=opened.architecture.rms_norm_eps,
        )
        self._family = opened.config.family
        self._layers = opened.load(runtime)
        if 1 < num_layers < runtime.max_draft_tokens:
            logger.warning(
                "proposer mtp has %d layers and max_draft_tokens is %d: drafts from the %dth on "
                "are by the last layer again, which was not trained for that",
                num_layers,
                runtime.max_draft_tokens,
                num_layers + 1,
            )

    def width(self, k: int) -> int:
        """What a step can have verified, and the slots whose deeper tokens were drafts then."""
        return k + len(self._layers)

    def num_loop_rows(self, allowance: int, k: int) -> int:
        """Drafts behind the window: those that the last layer goes on from."""
        return max(allowance - len(self._layers), 0)

    def extend(self, views: Views, rows: Rows, activations: Activations) -> Tensor:
        self.ops.load_slots(views["draft.behind"], rows.slot_mapping)
        return self.deepen(0, views, rows, activations)

    def deepen(self, depth: int, views: Views, rows: Rows, activations: Activations) -> Tensor:
        behind = views["draft.behind"]
        self._run(depth, views, rows, activations, behind)
        return behind

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
        self._run(len(self._layers) - 1, views, rows, activations, state)

    def logits(self, out: Tensor, state: Tensor, activations: Activations) -> None:
        self.ops.linear(out, state, self._layers[0].head)

    def _run(
        self, depth: int, views: Views, rows: Rows, activations: Activations, state: Tensor
    ) -> None:
        """One layer: state [T, hidden] in, the normed output in its place."""
        ops, layer = self.ops, self._layers[depth]
        hidden, normed = activations.hidden, activations.normed
        embedded, pair = (views[f"draft.{name}"][: len(state)] for name in ("embedded", "pair"))
        ops.embed(hidden, layer.embedding, rows.token_ids)
        if self._family.zero_first:
            ops.zero_first(hidden, rows.positions)
        ops.rms_norm(embedded, hidden, layer.embed_norm)
        ops.rms_norm(normed, state, layer.hidden_norm)
        parts = (normed, embedded) if self._family.hidden_first else (embedded, normed)
        ops.concat(pair, *parts)
        ops.linear(hidden, pair, layer.projection)
        ops.rms_norm(normed, hidden, layer.block.input_norm)
        layer.block.attend(normed, rows, activations)
        layer.block.feed_forward(activations)
        ops.rms_norm(state, hidden, layer.final_norm)


def _open(options: Mapping[str, object], site: DraftSite) -> DraftPlan:
    opened = open_mtp(site)
    architecture, num_layers = opened.architecture, opened.num_layers
    hidden, vocab_size = architecture.hidden_size, site.target.vocab_size
    kv = KVShape(num_kv_heads=architecture.num_kv_heads, head_dim=architecture.head_dim)
    return DraftPlan(
        kv_layers=(kv,) * num_layers,
        taps=(FINAL,),
        lookahead=num_layers,
        num_weight_bytes=opened.num_bytes(site.dtype),
        buffers=(
            *chain_buffers(
                architecture,
                vocab_size=vocab_size,
                target_vocab=vocab_size,
                draft_sampling=site.draft_sampling,
            ),
            scratch("embedded", hidden),
            scratch("pair", 2 * hidden),
            scratch("behind", hidden),
            BufferSpec(
                name="draft.shifted",
                shape=("T",),
                dtype=torch.int32,
                role="scratch",
                cells_only=True,
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
        model="optional",
    ),
    open=_open,
)
