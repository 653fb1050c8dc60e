"""The contract between a proposer that carries a model and the engine that runs it.

Before weights are read: a DraftSite tells what is known from headers, a DraftPlan what the proposer
will need, so that both fit one memory plan. After: a DraftRuntime hands over storages, ops and
layers. Draft KV lies over the target's block table, layer behind layer, so one allocation and one
rollback serve both, and a proposer keeps no state of a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol, runtime_checkable

import torch

from capture.buffers import BufferSpec, StaticBuffers
from capture.edge import Edge
from capture.stream import Stream
from proposers.base import Proposer, Runtime, TokenArray

Tensor = torch.Tensor

FINAL: Final = "final"
Tap = int | Literal["final"]
"""A hidden state of the target: the residual stream after so many layers (0: the embedding), or
what its output head reads, which is the last of them behind the final norm."""

DRAFT_TIER: Final = "draft"
"""Tier of the cells that a chain of drafts is captured in."""

# Buffers that `DraftOps.prepare_window` writes and reads. The first three, and the block table, are
# those of the window.
WINDOW: Final = ("token_ids", "positions", "slot_mapping")
WINDOW_WRITTEN: Final = (
    *WINDOW,
    "draft.last_rows",
    "draft.loop_positions",
    "draft.loop_slots",
    "draft.requests",
)
WINDOW_READ: Final = ("state_rows", "allowed_drafts", "draft.filled", "block_table")

Rows = Any
"""Inputs of a forward, made by `DraftRuntime.rows`; its `token_ids`, `positions` and `slot_mapping`
[T] int32 are those that it was made of."""

Activations = Any
"""Scratch of a forward, made by `DraftRuntime.activations`; its `hidden` [T, hidden] fp32 is the
residual stream."""


class Architecture(Protocol):
    """Sizes of a decoder-only transformer, target or draft, from its config."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def tie_word_embeddings(self) -> bool: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class KVShape:
    """Keys and values of one draft layer."""

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftPlan:
    """What a proposer needs of the engine, said from headers alone."""

    # one draft KV cache each, over the target's block table
    kv_layers: tuple[KVShape, ...]
    # which hidden states of the target it reads, in the order of their columns
    taps: tuple[Tap, ...] = ()
    # how many tokens behind its own a slot's draft KV depends on: 0, or the number of heads
    lookahead: int = 0
    num_weight_bytes: int
    # beside the target's static buffers, whose inputs the proposer shares
    buffers: tuple[BufferSpec, ...]
    # called once the target has been loaded; reads the draft's weights
    build: Callable[[DraftRuntime], ModelProposer]


class OpenedDecoder(Protocol):
    """A whole model whose headers have been read."""

    @property
    def architecture(self) -> Architecture: ...
    @property
    def num_weight_bytes(self) -> int: ...

    def load(self, runtime: DraftRuntime) -> DraftDecoder:
        """Read the weights; the runtime's KV caches are its layers'."""
        ...


class DraftSite(Protocol):
    """The engine as it is before any weight has been read."""

    @property
    def target(self) -> Architecture: ...
    @property
    def target_path(self) -> Path:
        """Directory or file of the target's checkpoint."""
        ...

    @property
    def model(self) -> str | None:
        """The draft's checkpoint, as the user gave it (`SpeculativeConfig.model`)."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of matrices, KV and stored hidden states."""
        ...

    @property
    def max_draft_tokens(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def draft_sampling(self) -> str: ...

    def read_architecture(self, raw: Mapping[str, Any]) -> Architecture:
        """Sizes from the contents of a config.json; ValueError where it is not supported."""
        ...

    def block_parameters(
        self, architecture: Architecture, *, input_size: int | None = None
    ) -> dict[str, Tensor]:
        """A `DraftRuntime.block`'s `destinations`, on the meta device."""
        ...

    def open_decoder(self) -> OpenedDecoder:
        """Open `model` as a decoder of the target's vocabulary; ValueError where it is none."""
        ...


class Block(Protocol):
    """One transformer layer with a draft KV cache of its own."""

    def destinations(self) -> dict[str, Tensor]:
        """Parameter name within the layer, e.g. `self_attn.q_proj.weight` -> where it goes.

        `input_layernorm.weight` is among them; what it normalises is the caller's.
        """
        ...

    @property
    def input_norm(self) -> Tensor: ...

    def inputs(self) -> Sequence[Tensor]:
        """Matrices [n, input_size] that read what `attend` is given."""
        ...

    def attend(self, x: Tensor, rows: Rows, activations: Activations) -> None:
        """hidden += attention of x [T, input_size]; captured."""
        ...

    def feed_forward(self, activations: Activations) -> None:
        """hidden += MLP of the normed hidden; captured."""
        ...


class DraftDecoder(Protocol):
    """A whole model over the draft KV caches."""

    def forward(self, inputs: Rows, buffers: Activations) -> None:
        """Leave the residual stream in the activations' `hidden`; captured."""
        ...

    def logits(self, out: Tensor, hidden: Tensor, normed: Tensor) -> None:
        """out [T, vocab] of the target's vocabulary; `normed` is scratch; captured."""
        ...


class DraftOps(Protocol):
    """Row-wise operations, all captured. Activations are fp32; outputs come first."""

    def prepare_window(self, views: Mapping[str, Tensor], rules: Tensor) -> None:
        """Make the rows of a chain, R requests of width W, out of what is known of the requests.

        Args:
            views: `WINDOW_WRITTEN`, of which the loop's have a row [R] for each of k + 1 steps, and
                `WINDOW_READ`.
            rules: [3 + k + 1] int32: W, `shift` and `num_embeddings`, then by the number of drafts
                how many are run on; see `ModelBasedProposer`.
        """

    def embed(self, out: Tensor, table: Tensor, token_ids: Tensor) -> None:
        """out [T, hidden] = table[token_ids]."""

    def rms_norm(self, out: Tensor, x: Tensor, weight: Tensor) -> None:
        """out [T, hidden] = RMSNorm(x) * weight [hidden] fp32; x may be out."""

    def linear(
        self,
        out: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        add: bool = False,
    ) -> None:
        """out [T, n] = x [T, k] @ weight [n, k]^T (+ bias [n] fp32), added to out with `add`."""

    def load_slots(self, out: Tensor, slots: Tensor) -> None:
        """out [T, taps * hidden] = the target's hidden states of these slots [T] int32."""

    def zero_first(self, out: Tensor, positions: Tensor) -> None:
        """out [T, hidden] = 0 where positions [T] int32 are 0, else as it is."""

    def concat(self, out: Tensor, first: Tensor, second: Tensor) -> None:
        """out [T, a + b] = first [T, a], second [T, b] side by side."""

    def take_rows(self, out: Tensor, x: Tensor, rows: Tensor) -> None:
        """out [R, hidden] = x[rows], rows [R] int32."""

    def shift_tokens(self, out: Tensor, token_ids: Tensor, last_rows: Tensor, new: Tensor) -> None:
        """out [R * W] = each request's W tokens moved up by one, `new` [R] in its last live row;
        `out` may be `token_ids`."""

    def choose(
        self,
        chosen: Tensor,
        drafts: Tensor,
        probs: Tensor | None,
        logits: Tensor,
        tokens: Tensor | None,
        requests: Tensor,
        step: int,
    ) -> None:
        """One draft of each request, as `proposers.drafting.DraftSampler` defines it.

        Args:
            chosen: [R] int32, the draft.
            drafts: [R, k + 1] int32; column `step` is written.
            probs: [R, k + 1, vocab] fp32, whose row `step` is written where drafts are drawn.
            logits: [R, draft_vocab] fp32, of no use afterwards.
            tokens: [draft_vocab] int32, the target's id of each column; None: the same.
            requests: [R, 5] int32, see `requests.py`.
        """


class DraftRuntime(Runtime, Protocol):
    """The engine as a model-carrying proposer sees it, its own storages in place."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def block_size(self) -> int: ...
    @property
    def max_fill_rows(self) -> int:
        """Rows that the static buffers have room for outside the table."""
        ...

    def ops(self, rms_norm_eps: float) -> DraftOps:
        """Operations whose norms have this epsilon."""
        ...

    @property
    def kv_caches(self) -> Sequence[Tensor]:
        """One for each of the plan's `kv_layers`."""
        ...

    @property
    def edge(self) -> Edge:
        """How inputs come into the buffers, and outputs back."""
        ...

    @property
    def stream(self) -> Stream:
        """Where everything runs that touches the buffers or the caches."""
        ...

    @property
    def layers(self) -> object:
        """What the engine makes its layers of, for the decoders that it opens itself."""
        ...

    @property
    def buffers(self) -> StaticBuffers:
        """The target's static buffers and the plan's."""
        ...

    @property
    def target_embedding(self) -> Tensor:
        """[vocab, hidden] of the target."""
        ...

    @property
    def target_head(self) -> Tensor:
        """[vocab, hidden] of the target's output head."""
        ...

    def block(
        self, architecture: Architecture, kv_cache: Tensor, *, input_size: int | None = None
    ) -> Block:
        """A layer with empty weights; q, k and v read `input_size` columns (None: hidden)."""
        ...

    def rows(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        max_query_len: int | None = None,
    ) -> Rows:
        """Inputs of a forward over static buffers; see `graphengine.attention.base`.

        Args:
            max_query_len: no request has more rows; None: all have as many.
        """
        ...

    def activations(self, views: Mapping[str, Tensor], num_rows: int) -> Activations:
        """Scratch of a forward of the plan's `draft.*` activations."""
        ...

    def plan(self, rows: Rows) -> None:
        """What attention prepares on the host before these rows run; never captured."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillInputs:
    """Prompt rows that the target has just filled."""

    # num_reqs arrays, int32 [num_tokens_i]: all that is known of each request
    token_ids: Sequence[TokenArray]
    # int32 [num_reqs]: leading slots that hold the target's KV, and room for the draft's
    num_slots: TokenArray
    # int32 [num_reqs]: leading slots that hold valid draft KV already
    draft_kv_lens: TokenArray
    # int32 [num_reqs, max_blocks]
    block_table: TokenArray
    # rows of all that the target has run for it in this step: a measure of what it may cost
    num_new_rows: int


@runtime_checkable
class ModelProposer(Proposer, Protocol):
    """A proposer with KV of its own. `propose` gets `ProposeInputs.cache`."""

    @property
    def suspects(self) -> str:
        """What may be wrong where its drafts are near chance, to follow "suspect"."""
        ...

    def variants(self) -> Iterator[tuple[str, ModelProposer]]:
        """The same weights under other conventions, one at a time, with a name for each.

        For finding out what is wrong with drafts near chance; not captured, and good for
        `first_drafts` alone.
        """
        ...

    def prefill(self, inputs: PrefillInputs) -> TokenArray:
        """Fill the draft KV of prompt rows; returns the leading slots that are valid now.

        int32 [num_reqs]. Runs outside the table, as the target's prefill does.
        """
        ...

    def first_drafts(self, token_ids: TokenArray, block_table: TokenArray) -> TokenArray:
        """The first draft at every place of a text whose target rows are in the cache.

        Args:
            token_ids: int32 [num_tokens], all known.
            block_table: int32 [max_blocks], where its rows lie.

        Returns:
            int32 [num_tokens]: what would be drafted to follow each token; NO_TOKEN where nothing
            can be. For the check at load; draft KV of the text's slots is written.
        """
        ...
