"""DeviceRows: what the captured step itself knows of every running request, and keeps up to date.

Rows are those of `RequestState`; one more, the last, is for padding requests and never changes. The
host writes a row when a request gets it; from then on the step's last op appends what it emits, and
its first op makes the next inputs out of it, so a step need not wait for the host to know what the
one before has emitted. Tensors keep their addresses for the life of the engine.
"""

from __future__ import annotations

import numpy as np
import torch

from capture.stream import Stream
from graphengine.request import Request
from graphengine.sampling.state import SamplerState


class DeviceRows:
    """See the module docstring.

    Attributes:
        num_tokens: [num_rows] int32, prompt and output.
        limits: [num_rows] int32, most tokens that a request may have.
        token_ids: [num_rows, max_model_len] int32, prompt and output; anything beyond.
        sampler: what the sampler reads.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        device: torch.device,
        stream: Stream,
    ) -> None:
        num_rows = max_num_seqs + 1
        self.padding_row = max_num_seqs
        self.max_model_len = max_model_len
        self.num_tokens = torch.ones(num_rows, dtype=torch.int32, device=device)
        self.limits = torch.ones(num_rows, dtype=torch.int32, device=device)
        self.token_ids = torch.zeros(num_rows, max_model_len, dtype=torch.int32, device=device)
        self.sampler = SamplerState(
            max_num_seqs=max_num_seqs, vocab_size=vocab_size, device=device, stream=stream
        )
        self._stream = stream

    @staticmethod
    def row_bytes(max_model_len: int, vocab_size: int) -> int:
        """Bytes of one request's rows."""
        return 4 * (max_model_len + 2) + SamplerState.row_bytes(vocab_size)

    def start(self, row: int, request: Request) -> None:
        """Give the row to a request, with all that is known of it."""
        tokens = torch.from_numpy(np.array(request.token_ids, dtype=np.int32))
        limit = request.limit

        def write() -> None:
            self.num_tokens[row] = len(tokens)
            self.limits[row] = limit
            self.token_ids[row, : len(tokens)].copy_(tokens)

        self._stream.run(write)
        self.sampler.start(row, request)
