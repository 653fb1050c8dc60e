"""SamplerState: what the captured sampler reads of every running request, in place.

Rows are those of `RequestState`, which brings them up to date; one more, the last, is for padding
requests and stays neutral. Tensors keep their addresses for the life of the engine. Knows nothing
of batches: a step says only which rows it is made of.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from graphengine.request import Request
from graphengine.sampling.masks import mask_of, mask_words
from graphengine.sampling.params import MAX_LOGIT_BIAS
from graphengine.sampling.settings import DTYPE, MASK, NEUTRAL, PENALTIES


class SamplerState:
    """Settings, token counts, bias and masks by state row.

    Attributes:
        settings: [num_rows, 12] int32, the words of `settings.DTYPE`.
        counts: [num_rows, vocab] int32, how often a token is in the output.
        in_prompt: [num_rows, vocab] uint8, whether it is in the prompt.
        bias_ids, bias_values: [num_rows, MAX_LOGIT_BIAS], int32 and fp32.
    """

    def __init__(self, *, max_num_seqs: int, vocab_size: int) -> None:
        num_rows = max_num_seqs + 1
        self.vocab_size = vocab_size
        self.padding_row = max_num_seqs
        self._settings = np.full(num_rows, NEUTRAL)
        self.settings = torch.from_numpy(self._settings.view(np.int32).reshape(num_rows, -1))
        self.counts = torch.zeros(num_rows, vocab_size, dtype=torch.int32)
        self.in_prompt = torch.zeros(num_rows, vocab_size, dtype=torch.uint8)
        self.bias_ids = torch.zeros(num_rows, MAX_LOGIT_BIAS, dtype=torch.int32)
        self.bias_values = torch.zeros(num_rows, MAX_LOGIT_BIAS)
        # [num_rows, 2, words]: what may come before min_tokens are out, and after
        self._masks = np.zeros((num_rows, 2, mask_words(vocab_size)), dtype=np.int32)
        self._min_tokens = np.zeros(num_rows, dtype=np.int32)

    @staticmethod
    def row_bytes(vocab_size: int) -> int:
        """Bytes of one request's rows."""
        return DTYPE.itemsize + 5 * vocab_size + 8 * MAX_LOGIT_BIAS + 8 * mask_words(vocab_size) + 4

    def start(self, row: int, request: Request) -> None:
        """Give the row to a request, without its output."""
        params, entry = request.params, self._settings[row : row + 1]
        entry[:] = NEUTRAL
        for name in ("temperature", "top_k", "top_p", "min_p"):
            entry[name] = getattr(params, name)
        entry["seed"] = request.seed
        entry["choice"] = request.choice
        entry["num_bias"] = len(params.bias)
        for place, (token, value) in enumerate(params.bias):
            self.bias_ids[row, place], self.bias_values[row, place] = token, value
        if params.has_penalties:
            entry["flags"] |= PENALTIES
            for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
                entry[name] = getattr(params, name)
            self.counts[row] = 0
            self.in_prompt[row] = 0
            self.in_prompt[row, list(set(request.prompt_token_ids))] = 1
        if params.has_mask:
            entry["flags"] |= MASK
            after = mask_of(params.allowed_ids, self.vocab_size)
            self._masks[row] = after
            self._masks[row, 0] &= ~mask_of(request.stop_token_ids, self.vocab_size)
            self._min_tokens[row] = params.min_tokens

    def count(self, row: int, token_ids: Sequence[int]) -> None:
        """Tokens that have joined the output of the row's request."""
        if self._settings["flags"][row] & PENALTIES:
            np.add.at(self.counts[row].numpy(), np.asarray(token_ids, dtype=np.intp), 1)

    def has_mask(self, row: int) -> bool:
        return bool(self._settings["flags"][row] & MASK)

    def mask(self, row: int, num_output_tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Bit masks `[n, words]` of rows that come after so many output tokens, `[n]`."""
        is_after = (num_output_tokens >= self._min_tokens[row]).astype(np.intp)
        masks: npt.NDArray[np.int32] = self._masks[row][is_after]
        return masks
