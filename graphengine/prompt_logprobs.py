"""Log-probabilities of prompt tokens, collected while the prompt is prefilled.

The row of a position tells of the token behind it, which a prompt has already: so the rows of
prefill are all that is needed, but for those that a prefix cache would save. Beside the table, as
prefill is. Knows nothing of scheduling; what a request has been given already it is not given
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from graphengine.models.block import ForwardBuffers
from graphengine.models.decoder import Decoder
from graphengine.opset import OpSet
from graphengine.sampling.logprobs import read_logprobs
from graphengine.sampling.params import MAX_LOGPROBS
from graphengine.scheduler import PrefillChunk

ROWS: Final = 32  # whose logits are computed at a time


class PromptLogprobs:
    """See the module docstring.

    Args:
        decoder: whose logits they are.
        opset: of the decoder.
    """

    def __init__(self, decoder: Decoder, opset: OpSet) -> None:
        self._decoder = decoder
        self._logits = torch.empty(ROWS, decoder.config.vocab_size, device=opset.device)
        self._logprobs = opset.logprobs()

    @staticmethod
    def num_bytes(vocab_size: int) -> int:
        """Bytes of the logits that it keeps room for."""
        return ROWS * vocab_size * 4

    def collect(self, buffers: ForwardBuffers, chunks: Sequence[PrefillChunk]) -> None:
        """Give each request what its chunk tells.

        Args:
            buffers: just after the forward of these chunks, whose rows are in their order.
        """
        start = 0  # of the chunk's rows
        for chunk in chunks:
            request = chunk.request
            if request.needs_whole_prompt:
                assert request.prompt_logprobs is not None
                end = min(chunk.start + chunk.num_tokens, request.num_prompt_tokens - 1)
                while (low := len(request.prompt_logprobs) - 1) < end:
                    high = min(low + len(self._logits), end)
                    rows = slice(start + low - chunk.start, start + high - chunk.start)
                    self._read(chunk, buffers.rows(rows), low)
            start += chunk.num_tokens

    def _read(self, chunk: PrefillChunk, buffers: ForwardBuffers, position: int) -> None:
        """Append what these rows tell, the first of them at `position`."""
        request, num_rows = chunk.request, len(buffers.hidden)
        number, known = request.params.prompt_logprobs, request.prompt_logprobs
        assert number is not None
        assert known is not None
        logits = self._logits[:num_rows]
        self._decoder.logits(logits, buffers.hidden, buffers.normed)
        following = request.prompt_token_ids[position + 1 : position + 1 + num_rows]
        device, width = logits.device, MAX_LOGPROBS + 1
        views = {
            "logits": logits,
            "target_ids": torch.tensor(following, dtype=torch.int32, device=device),
            "logprob_ids": torch.empty(num_rows, width, dtype=torch.int32, device=device),
            "logprob_values": torch.empty(num_rows, width, device=device),
            "logprob_ranks": torch.empty(num_rows, dtype=torch.int32, device=device),
        }
        self._logprobs(views)
        ids, values = views["logprob_ids"].cpu().numpy(), views["logprob_values"].cpu().numpy()
        ranks = views["logprob_ranks"].tolist()
        known.extend(
            read_logprobs(ids[row], values[row], ranks[row], number) for row in range(num_rows)
        )
