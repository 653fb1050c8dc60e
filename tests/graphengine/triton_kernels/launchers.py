"""The Triton launchers called as the kernel tests call the native library, by the same names."""

from __future__ import annotations

from typing import get_args

from torch import Tensor

from graphengine.triton_kernels.choose import ChooseDrafts
from graphengine.triton_kernels.logprobs import row_logprobs
from graphengine.triton_kernels.process import process_logits
from graphengine.triton_kernels.sample import reject_rows, sample_rows
from proposers.base import DraftSampling
from tests.graphengine.kernels.calls import Kernels


class Launchers(Kernels):
    """As much of `Kernels` as there is a launcher for; sizes at the end of a call are dropped."""

    def __init__(self) -> None:
        pass  # there is no library

    def call(self, name: str, *arguments: Tensor | int | None) -> None:
        getattr(self, f"_{name}")(*arguments)

    def _process_logits(self, *arguments: Tensor) -> None:
        out, logits, token_ids, query_len, state_rows, *tables, mask = arguments[:11]
        out, logits = out.flatten(0, -2), logits.flatten(0, -2)
        process_logits(out, logits, token_ids, query_len, state_rows, mask, *tables)

    def _sample_rows(self, *arguments: Tensor) -> None:
        ids, processed, *rest = arguments[:6]
        sample_rows(ids, processed.flatten(0, -2), *rest)

    def _reject_rows(self, *arguments: Tensor) -> None:
        ids, processed, probs, token_ids, positions, query_len, *rest = arguments[:10]
        num_drafts, has_probs, state_rows, settings = rest
        cell = (token_ids, positions, query_len, state_rows)
        reject_rows(ids, processed, probs, num_drafts, has_probs, settings, *cell)

    def _row_logprobs(self, *arguments: Tensor) -> None:
        row_logprobs(*arguments[:5])

    def _choose_drafts(self, *arguments: Tensor | int | None) -> None:
        sampling = get_args(DraftSampling)[arguments[-1]]
        ChooseDrafts(sampling)(*arguments[:6], arguments[-2])
