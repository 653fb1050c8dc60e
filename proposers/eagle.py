"""eagle: drafts by a trained head over the target's hidden states.

EAGLE-1 and 2 (Li et al. 2024, arXiv 2401.15077) and EAGLE-3 (Li et al. 2025, arXiv 2503.01840) with
the flags of EAGLE-3.1. Row i of the head joins token i + 1 with the target's *feature* at i, and
guesses token i + 2; behind the last feature it goes on with what it gave itself. As features are
kept by slot, a cached prefix, a chunk or a pause is a gap like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from proposers.chain import chain_buffers, scratch
from proposers.checkpoint import DraftCheckpoint
from proposers.device import (
    Activations,
    Architecture,
    DraftPlan,
    DraftRuntime,
    DraftSite,
    KVShape,
    Rows,
)
from proposers.eagle_config import EagleConfig, read_eagle_config
from proposers.eagle_weights import (
    EMBEDDING,
    HEAD,
    EagleWeights,
    canonical_names,
    check,
    draft_tokens,
    load,
)
from proposers.info import ProposerInfo, ProposerSpec
from proposers.model_based import ModelBasedProposer, Views

Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedHead:
    """A head whose headers, and table of draft ids, have been read."""

    checkpoint: DraftCheckpoint
    config: EagleConfig
    architecture: Architecture
    target: Architecture
    tokens: Tensor | None  # [draft_vocab] int32, the target's ids; None: the same

    def weights(self, dtype: torch.dtype, device: torch.device) -> EagleWeights:
        """The head's parameters beside its layers, empty."""
        names = canonical_names(self.checkpoint)
        return EagleWeights.allocate(
            self.config, self.architecture, self.target, names, dtype=dtype, device=device
        )

    def layers(self, site: DraftSite) -> list[dict[str, Tensor]]:
        """Parameters of each layer on the meta device, by their names within it."""
        return [
            site.block_parameters(self.architecture, input_size=self.input_size(index))
            for index in range(self.architecture.num_layers)
        ]

    def input_size(self, index: int) -> int:
        """Columns that q, k and v of a layer read: embedding and feature in EAGLE-3's first."""
        hidden = self.architecture.hidden_size
        return 2 * hidden if self.config.version == 3 and index == 0 else hidden


class EagleProposer(ModelBasedProposer):
    """See the module docstring.

    Args:
        runtime: of the engine.
        opened: the head; its weights are read here.
    """

    name = "eagle"
    needs_hidden_states = True
    needs_tokens = False
    suspects = (
        "a norm (norm_before_residual, norm_output, fc_norm), the order of concatenation, the aux "
        "layers, d2t, the head, or a checkpoint of another target"
    )

    def __init__(self, runtime: DraftRuntime, opened: OpenedHead) -> None:
        architecture = opened.architecture
        weights = opened.weights(runtime.dtype, runtime.device)
        embedding = runtime.target_embedding if weights.embed is None else weights.embed
        super().__init__(
            runtime,
            shift=1,
            lookahead=1,
            max_len=architecture.max_position_embeddings,
            num_embeddings=len(embedding),
            rms_norm_eps=architecture.rms_norm_eps,
            tokens=opened.tokens,
        )
        self._opened, self._config, self._weights = opened, opened.config, weights
        self._blocks = [
            runtime.block(architecture, kv_cache, input_size=opened.input_size(index))
            for index, kv_cache in enumerate(runtime.kv_caches)
        ]
        load(opened.checkpoint, weights, [block.destinations() for block in self._blocks])
        self._embedding = embedding
        self._head = runtime.target_head if weights.head is None else weights.head
        # Gains are in fc: see `load`.
        self._ones = torch.ones(opened.target.hidden_size, device=runtime.device)

    def variants(self) -> Iterator[tuple[str, ModelBasedProposer]]:
        """Flags turned round, inputs swapped, ids without their table, the target's head."""
        opened, config = self._opened, self._config
        if config.version == 3:
            for flag in ("norm_before_residual", "norm_output"):
                turned: dict[str, Any] = {flag: not getattr(config, flag)}
                other = replace(config, **turned)
                yield f"norm ({flag})", self._again(replace(opened, config=other))
        yield "order of concatenation", self._again(opened).swapped()
        if opened.tokens is not None:
            yield "d2t", self._again(replace(opened, tokens=None))
        if self._weights.head is not None and self._head.shape == self.runtime.target_head.shape:
            yield "head", self._again(opened).borrowing()

    def _again(self, opened: OpenedHead) -> EagleProposer:
        return EagleProposer(self.runtime, opened)

    def borrowing(self) -> EagleProposer:
        """Itself, with the target's output head."""
        self._head = self.runtime.target_head
        return self

    def swapped(self) -> EagleProposer:
        """Itself, the columns of embedding and feature in each other's place."""
        joins = self._weights.fc if self._config.version == 1 else None
        for matrix in self._blocks[0].inputs() if joins is None else (joins,):
            matrix.copy_(torch.cat(list(reversed(matrix.chunk(2, dim=1))), dim=1))
        return self

    def extend(self, views: Views, rows: Rows, activations: Activations) -> Tensor:
        self._load_features(views, activations)
        self._forward(views, views["token_ids"], rows, activations)
        state: Tensor = activations.hidden
        return state

    def step(self, views: Views, rows: Rows, activations: Activations, state: Tensor) -> None:
        self._forward(views, views["draft.chosen"], rows, activations.with_hidden(state))

    def logits(self, out: Tensor, state: Tensor, activations: Activations) -> None:
        norm = self._weights.norm
        if norm is not None and not self._config.norm_output:
            self.ops.rms_norm(activations.normed, state, norm)
            state = activations.normed
        self.ops.linear(out, state, self._head)

    def _load_features(self, views: Views, activations: Activations) -> None:
        """Leave the features of the target's hidden states in the activations' `hidden`."""
        ops, weights, hidden = self.ops, self._weights, activations.hidden
        if not self._config.projects_taps:
            ops.load_slots(hidden, views["slot_mapping"])
            return
        taps = views["draft.taps"]
        ops.load_slots(taps, views["slot_mapping"])
        if weights.input_norm is not None:
            ops.rms_norm(taps, taps, weights.input_norm)
        if self._config.fc_norm:
            each = taps.view(-1, len(self._ones))
            ops.rms_norm(each, each, self._ones)
        assert weights.fc is not None, "taps are projected"
        ops.linear(hidden, taps, weights.fc, weights.fc_bias)

    def _forward(
        self, views: Views, token_ids: Tensor, rows: Rows, activations: Activations
    ) -> None:
        """From features in `hidden`, and the tokens behind them, to the state in the same place."""
        ops, config, weights = self.ops, self._config, self._weights
        hidden, normed = activations.hidden, activations.normed
        first, *rest = self._blocks
        embedded, joined = (
            views[f"draft.{name}"][: len(hidden)] for name in ("embedded", "joined")
        )
        ops.embed(embedded, self._embedding, token_ids)
        if weights.hidden_norm is None:
            assert weights.fc is not None, "EAGLE-1 joins by its projection"
            ops.concat(joined, embedded, hidden)
            ops.linear(hidden, joined, weights.fc, weights.fc_bias)
            first.attend(hidden, rows, activations)
        else:
            feature = hidden if config.norm_before_residual else normed
            ops.rms_norm(embedded, embedded, first.input_norm)
            ops.rms_norm(feature, hidden, weights.hidden_norm)
            ops.concat(joined, embedded, feature)
            first.attend(joined, rows, activations)
        first.feed_forward(activations)
        for block in rest:
            ops.rms_norm(normed, hidden, block.input_norm)
            block.attend(normed, rows, activations)
            block.feed_forward(activations)
        if weights.norm is not None and config.norm_output:
            ops.rms_norm(hidden, hidden, weights.norm)


def _open(options: Mapping[str, object], site: DraftSite) -> DraftPlan:
    opened = _open_head(site)
    config, architecture, target = opened.config, opened.architecture, site.target
    hidden, weights = architecture.hidden_size, opened.weights(site.dtype, torch.device("meta"))
    parameters = [tensor for layer in opened.layers(site) for tensor in layer.values()]
    buffers = chain_buffers(
        architecture,
        vocab_size=config.draft_vocab_size or target.vocab_size,
        target_vocab=target.vocab_size,
        draft_sampling=site.draft_sampling,
    )
    buffers += [scratch("embedded", hidden), scratch("joined", 2 * hidden)]
    if config.projects_taps:
        buffers.append(scratch("taps", len(config.taps) * target.hidden_size))
    kv_shape = KVShape(num_kv_heads=architecture.num_kv_heads, head_dim=architecture.head_dim)
    return DraftPlan(
        kv_layers=(kv_shape,) * architecture.num_layers,
        taps=config.taps,
        lookahead=1,
        num_weight_bytes=weights.num_bytes + sum(one.nbytes for one in parameters),
        buffers=tuple(buffers),
        build=lambda runtime: EagleProposer(runtime, opened),
    )


def _open_head(site: DraftSite) -> OpenedHead:
    """Read headers and the table of draft ids; everything that can be refused by them is."""
    assert site.model is not None, "no head was named"
    checkpoint = DraftCheckpoint.open(site.model)
    names, target = canonical_names(checkpoint), site.target
    config = read_eagle_config(checkpoint.config, names, num_target_layers=target.num_layers)
    architecture = site.read_architecture(config.layer)
    num_columns = config.draft_vocab_size or target.vocab_size
    _check_sizes(config, architecture, target, names)
    tokens = draft_tokens(checkpoint, names, num_columns=num_columns, vocab_size=target.vocab_size)
    last = target.vocab_size - 1 if tokens is None else int(tokens.max())
    if EMBEDDING in names and config.vocab_size <= last:
        raise ValueError(
            f"config.json: vocab_size={config.vocab_size}, and so the head's {EMBEDDING} lacks "
            f"rows of what may be drafted, ids up to {last}"
        )
    opened = OpenedHead(
        checkpoint=checkpoint,
        config=config,
        architecture=architecture,
        target=target,
        tokens=tokens,
    )
    check(checkpoint, opened.weights(site.dtype, torch.device("meta")), opened.layers(site))
    return opened


def _check_sizes(
    config: EagleConfig, head: Architecture, target: Architecture, names: Mapping[str, str]
) -> None:
    """Hold the head's sizes to the target's."""
    key = "hidden_size" if config.target_hidden_size is None else "target_hidden_size"
    expected = config.target_hidden_size or head.hidden_size
    if expected != target.hidden_size:
        raise ValueError(
            f"config.json: {key}={expected}, but the target's hidden_size is {target.hidden_size}: "
            "this head is of another target"
        )
    borrowed = [name for name in (EMBEDDING, HEAD) if name not in names]
    borrowed += [] if config.projects_taps else ["fc.weight over target states"]
    if borrowed and head.hidden_size != target.hidden_size:
        raise ValueError(
            f"config.json: hidden_size={head.hidden_size} is not the target's "
            f"{target.hidden_size}, so it cannot do without its own {', '.join(borrowed)}"
        )
    columns = config.draft_vocab_size or target.vocab_size
    for name, value in (("vocab_size", config.vocab_size), ("draft_vocab_size", columns)):
        if value > target.vocab_size:
            raise ValueError(
                f"config.json: {name}={value} is more than the target's vocabulary of "
                f"{target.vocab_size}: this head is of another target"
            )
    if HEAD not in names and columns != target.vocab_size:
        raise ValueError(
            f"config.json: draft_vocab_size={columns}, but the weights have no {HEAD}, and the "
            f"target's has {target.vocab_size} rows"
        )


SPEC = ProposerSpec(
    info=ProposerInfo(
        name=EagleProposer.name,
        summary="a trained head over the target's hidden states (EAGLE-1/2/3)",
        kind="device",
        graph_safe=True,
        needs_hidden_states=True,
        produces_probs=True,
        needs_tokens=False,
        model="required",
    ),
    open=_open,
)
