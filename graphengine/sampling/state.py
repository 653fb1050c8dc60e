"""SamplerState: what the captured sampler reads of every running request, in place.

Rows are those of `DeviceRows`, which has one more than there are requests, the last, for padding;
that one stays neutral. Tensors keep their addresses for the life of the engine. Knows nothing of
batches: a step says only which rows it is made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from capture.stream import Stream
from graphengine.request import Request
from graphengine.sampling.masks import mask_of, mask_words
from graphengine.sampling.params import MAX_LOGIT_BIAS
from graphengine.sampling.settings import DTYPE, MASK, NEUTRAL, PENALTIES

Written = tuple[torch.Tensor, npt.NDArray[Any]]  # and what goes there


class SamplerState:
    """Settings, token counts, bias and masks by state row.

    Attributes:
        settings: [num_rows, 12] int32, the words of `settings.DTYPE`.
        counts: [num_rows, vocab] int32, how often a token is in the output; a step that emits
            tokens of a row with penalties counts them.
        in_prompt: [num_rows, vocab] uint8, whether it is in the prompt.
        bias_ids, bias_values: [num_rows, MAX_LOGIT_BIAS], int32 and fp32.
    """

    def __init__(
        self, *, max_num_seqs: int, vocab_size: int, device: torch.device, stream: Stream
    ) -> None:
        num_rows = max_num_seqs + 1
        self.vocab_size = vocab_size
        self.padding_row = max_num_seqs

        def zeros(width: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(num_rows, width, dtype=dtype, device=device)

        self.settings = zeros(len(_words(NEUTRAL)), torch.int32)
        self.settings[:] = torch.from_numpy(_words(NEUTRAL))
        self.counts = zeros(vocab_size, torch.int32)
        self.in_prompt = zeros(vocab_size, torch.uint8)
        self.bias_ids = zeros(MAX_LOGIT_BIAS, torch.int32)
        self.bias_values = zeros(MAX_LOGIT_BIAS, torch.float32)
        self._stream = stream
        # The host's. [num_rows, 2, words]: what may come before min_tokens are out, and after
        self._has_mask = np.zeros(num_rows, dtype=np.bool_)
        self._masks = np.zeros((num_rows, 2, mask_words(vocab_size)), dtype=np.int32)
        self._min_tokens = np.zeros(num_rows, dtype=np.int32)

    @staticmethod
    def row_bytes(vocab_size: int) -> int:
        """Bytes of one request's rows."""
        return DTYPE.itemsize + 5 * vocab_size + 8 * MAX_LOGIT_BIAS + 8 * mask_words(vocab_size) + 5

    def start(self, row: int, request: Request) -> None:
        """Give the row to a request, with its output so far."""
        params, entry = request.params, NEUTRAL.copy()
        for name in ("temperature", "top_k", "top_p", "min_p"):
            entry[name] = getattr(params, name)
        entry["seed"] = request.seed
        entry["choice"] = request.choice
        entry["num_bias"] = len(params.bias)
        written: list[Written] = []
        if params.bias:
            tokens, values = zip(*params.bias, strict=True)
            bias = slice(0, len(tokens))
            written.append((self.bias_ids[row, bias], np.array(tokens, dtype=np.int32)))
            written.append((self.bias_values[row, bias], np.array(values, dtype=np.float32)))
        if params.has_penalties:
            entry["flags"] |= PENALTIES
            for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
                entry[name] = getattr(params, name)
            written.append((self.counts[row], self._counted(request.output_token_ids)))
            in_prompt = self._counted(request.prompt_token_ids).astype(np.bool_).astype(np.uint8)
            written.append((self.in_prompt[row], in_prompt))
        self._has_mask[row] = params.has_mask
        if params.has_mask:
            entry["flags"] |= MASK
            after = mask_of(params.allowed_ids, self.vocab_size)
            self._masks[row] = after
            self._masks[row, 0] &= ~mask_of(request.stop_token_ids, self.vocab_size)
            self._min_tokens[row] = params.min_tokens
        written.append((self.settings[row], _words(entry)))
        self._stream.run(lambda: _write(written))

    def _counted(self, token_ids: npt.ArrayLike) -> npt.NDArray[np.int32]:
        ids = np.asarray(token_ids, dtype=np.intp)
        return np.bincount(ids, minlength=self.vocab_size).astype(np.int32)

    def has_mask(self, row: int) -> bool:
        return bool(self._has_mask[row])

    def mask(self, row: int, num_output_tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Bit masks `[n, words]` of rows that come after so many output tokens, `[n]`."""
        is_after = (num_output_tokens >= self._min_tokens[row]).astype(np.intp)
        masks: npt.NDArray[np.int32] = self._masks[row][is_after]
        return masks


def _words(entry: npt.NDArray[np.void]) -> npt.NDArray[np.int32]:
    """A row of settings as int32 words."""
    return np.frombuffer(entry.tobytes(), dtype=np.int32).copy()


def _write(written: Sequence[Written]) -> None:
    for tensor, values in written:
        tensor.copy_(torch.from_numpy(values))
