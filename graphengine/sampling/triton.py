"""Sampler and log-probabilities of a cell on a GPU, by the project's own Triton kernels.

Owns the kernels' arguments; the interfaces are those of `cpu.py`, the definitions in
`reference.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from capture.ops import CompiledOp
from graphengine.sampling.state import SamplerState
from graphengine.triton_kernels.logprobs import row_logprobs
from graphengine.triton_kernels.process import process_logits
from graphengine.triton_kernels.sample import reject_rows, sample_rows

Tensor = torch.Tensor


class TritonSampler:
    """Processed logits and the target's tokens of a cell.

    Args:
        state: read in place; its tensors must outlive the graphs.
        rejection: the target's token is the draft where that is accepted by the ratio of its
            probabilities, else one from what is left.
    """

    def __init__(self, state: SamplerState, *, rejection: bool = False) -> None:
        self._state = state
        self._process = CompiledOp("process_logits", process_logits)
        self._sample = CompiledOp("sample_rows", sample_rows)
        self._reject = CompiledOp("reject_rows", reject_rows) if rejection else None

    def __call__(self, views: Mapping[str, Tensor]) -> None:
        """Write `processed` [T, vocab] and `target_ids` [T] of `logits` [T, vocab]."""
        state, ids, processed = self._state, views["target_ids"], views["processed"]
        tables = (state.settings, state.counts, state.in_prompt, state.bias_ids, state.bias_values)
        rows = [views[name] for name in ("logits", "token_ids", "query_len", "state_rows", "mask")]
        self._process(processed, *rows, *tables)
        places = [views[name] for name in ("positions", "query_len", "state_rows")]
        self._sample(ids, processed, *places, state.settings)
        if self._reject is None:
            return
        drafts = [views[name] for name in ("draft_probs", "num_draft_tokens", "has_draft_probs")]
        cell = [views[name] for name in ("token_ids", "positions", "query_len", "state_rows")]
        self._reject(ids, processed, *drafts, state.settings, *cell)


class TritonLogprobs:
    """Log-probabilities of a cell's rows by the model's own logits."""

    def __init__(self) -> None:
        self._op = CompiledOp("row_logprobs", row_logprobs)

    def __call__(self, views: Mapping[str, Tensor]) -> None:
        """Write `logprob_ids` and `logprob_values` [T, MAX_LOGPROBS + 1] and `logprob_ranks` [T].

        Column 0 is the row's token in `target_ids`, those behind it are the likeliest.
        """
        names = ("logprob_ids", "logprob_values", "logprob_ranks", "logits", "target_ids")
        self._op(*(views[name] for name in names))
