"""Sampler and verifier by the project's own C++ kernels: what runs between logits and the host.

Owns the kernels' arguments. The verifier is integers alone, so its results are those of the torch
form in `verifier.py`; the sampler's definition is `reference.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from graphengine.kernels.ops import check_contiguous, native_op
from graphengine.sampling.params import MAX_LOGIT_BIAS
from graphengine.sampling.state import SamplerState

Tensor = torch.Tensor


class NativeGreedyVerify:
    """`greedy_verify` of `verifier.py` as one native call."""

    def __init__(self) -> None:
        self._op = native_op("greedy_verify")

    def __call__(
        self,
        packed: Tensor,
        target_ids: Tensor,
        token_ids: Tensor,
        query_len: Tensor,
        num_draft_tokens: Tensor,
        stop_ids: Tensor,
        max_new_tokens: Tensor,
    ) -> None:
        tensors = (
            packed,
            target_ids,
            token_ids,
            query_len,
            num_draft_tokens,
            stop_ids,
            max_new_tokens,
        )
        check_contiguous(*tensors)
        self._op(*tensors, packed.shape[0], packed.shape[1], stop_ids.shape[1])


class NativeSampler:
    """Processed logits and the target's tokens of a cell, as native calls.

    Args:
        state: read in place; its tensors must outlive the graphs.
        rejection: the target's token is the draft where that is accepted by the ratio of its
            probabilities, else one from what is left.
    """

    def __init__(self, state: SamplerState, *, rejection: bool = False) -> None:
        self._state = state
        self._reject = native_op("reject_rows") if rejection else None
        self._process = native_op("process_logits")
        self._sample = native_op("sample_rows")

    def __call__(self, views: Mapping[str, Tensor]) -> None:
        """Write `processed` [T, vocab] and `target_ids` [T] of `logits` [T, vocab]."""
        state, processed = self._state, views["processed"]
        inputs = [views[name] for name in ("logits", "token_ids", "query_len", "state_rows")]
        tables = (state.settings, state.counts, state.in_prompt, state.bias_ids, state.bias_values)
        check_contiguous(processed, *inputs, *tables, views["mask"], views["positions"])
        self._process(processed, *inputs, *tables, views["mask"], *processed.shape, MAX_LOGIT_BIAS)
        self._sample(
            views["target_ids"],
            processed,
            views["positions"],
            views["query_len"],
            views["state_rows"],
            state.settings,
            *processed.shape,
        )
        if self._reject is None:
            return
        names = ("token_ids", "positions", "query_len", "num_draft_tokens", "has_draft_probs")
        others = [views[name] for name in (*names, "state_rows")]
        check_contiguous(views["draft_probs"], *others)
        self._reject(
            views["target_ids"],
            processed,
            views["draft_probs"],
            *others,
            state.settings,
            *processed.shape,
        )


class NativeLogprobs:
    """Log-probabilities of a cell's rows by the model's own logits, as one native call."""

    def __init__(self) -> None:
        self._op = native_op("row_logprobs")

    def __call__(self, views: Mapping[str, Tensor]) -> None:
        """Write `logprob_ids` and `logprob_values` [T, MAX_LOGPROBS + 1] and `logprob_ranks` [T].

        Column 0 is the row's token in `target_ids`, those behind it are the likeliest.
        """
        names = ("logprob_ids", "logprob_values", "logprob_ranks", "logits", "target_ids")
        tensors = [views[name] for name in names]
        check_contiguous(*tensors)
        self._op(*tensors, *views["logits"].shape, views["logprob_ids"].shape[1])
