"""The engine as a model-carrying proposer sees it while it runs (`proposers.device.DraftRuntime`).

Owns how the engine's layers, ops and storages are handed over: draft layers are the target's own
`Block`s, with weights and KV caches of their own. Knows no concrete proposer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from capture.buffers import StaticBuffers
from graphengine.attention.base import AttentionBatch
from graphengine.model_runner import ModelRunner
from graphengine.models.block import Block, ForwardBuffers, ForwardInputs
from graphengine.models.config import ModelConfig
from graphengine.resolve import MAX_PREFILL_ROWS, ResolvedConfig
from graphengine.runtime import EngineRuntime
from proposers.base import DraftSampling, FloatArray, RequestSampling
from proposers.device import Architecture, DraftOps

Tensor = torch.Tensor


class EngineDraftRuntime:
    """See the module docstring.

    Args:
        resolved: of the engine; has a draft plan.
        runner: of the target, loaded.
        kv_caches: one for each of the plan's layers.
    """

    def __init__(
        self, resolved: ResolvedConfig, runner: ModelRunner, kv_caches: Sequence[Tensor]
    ) -> None:
        facts = EngineRuntime.of(resolved)
        self.vocab_size = facts.vocab_size
        self.max_model_len = facts.max_model_len
        self.max_num_seqs = facts.max_num_seqs
        self.max_draft_tokens = facts.max_draft_tokens
        self.device = facts.device
        self.draft_sampling: DraftSampling = facts.draft_sampling
        self.dtype = resolved.dtype
        self.block_size = resolved.sizes.block_size
        self.max_fill_rows = MAX_PREFILL_ROWS
        self.kv_caches = kv_caches
        self.buffers: StaticBuffers = runner.buffers
        self.edge = runner.edge
        self.stream = runner.stream
        self.layers = runner.layers
        self._facts = facts
        self._hidden_states = runner.hidden_states
        self._device_rows = runner.device_rows
        self._weights = runner.decoder.weights
        self._opset = runner.layers.opset

    def gumbels(
        self, request: RequestSampling, position: int, stream: Literal["target", "draft"]
    ) -> FloatArray:
        """Gumbel numbers [vocab_size] of a place, as the captured sampler has them."""
        return self._facts.gumbels(request, position, stream)

    @property
    def target_embedding(self) -> Tensor:
        return self._weights.embed

    @property
    def target_head(self) -> Tensor:
        return self._weights.lm_head

    def ops(self, rms_norm_eps: float) -> DraftOps:
        """Operations whose norms have this epsilon."""
        return self._opset.draft_ops(
            rms_norm_eps,
            self._hidden_states,
            self._device_rows,
            block_size=self.block_size,
            draft_sampling=self.draft_sampling,
        )

    def block(
        self, architecture: Architecture, kv_cache: Tensor, *, input_size: int | None = None
    ) -> Block:
        """A layer of an architecture that the site has read, its weights still empty."""
        assert isinstance(architecture, ModelConfig), f"{architecture!r} is of another engine"
        return self.layers.block(architecture, kv_cache, input_size=input_size)

    def rows(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        max_query_len: int | None = None,
    ) -> ForwardInputs:
        longest = len(positions) // len(block_table) if max_query_len is None else max_query_len
        batch = AttentionBatch(block_table, query_start_loc, positions, longest)
        return ForwardInputs(token_ids, positions, slot_mapping, batch)

    def activations(self, views: Mapping[str, Tensor], num_rows: int) -> ForwardBuffers:
        return ForwardBuffers.of(views, "draft.").rows(slice(0, num_rows))

    def plan(self, rows: ForwardInputs) -> None:
        """Nothing: the kernels read lengths and tables from the rows' own tensors."""
