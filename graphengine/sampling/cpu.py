"""The greedy verifier by the project's own C++ kernel: the rule of `verifier.py`, for CPU.

Owns the kernel's arguments. Integers alone, so its results are those of the torch form.
"""

from __future__ import annotations

import torch

from graphengine.kernels.ops import check_contiguous, native_op

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
