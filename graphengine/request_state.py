"""RequestState: the persistent rows of running requests, apart from the inputs of any step.

A request keeps its row from admission to its end or preemption, whatever batch it is in; a step
gathers from rows and never moves them. Host-side numpy, read by the step batch and the proposers;
`device` has what the step reads. A row knows whose it is: it is brought up to date by looking at
what it holds, never by being told what has changed, and what is not up to date is not read.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from capture.stream import InlineStream, Stream
from graphengine.device_rows import DeviceRows
from graphengine.request import Request
from graphengine.sampling.verifier import NO_STOP

MAX_STOP_IDS = 64
NOBODY = -1  # no admission has this number

IntArray = npt.NDArray[np.int32]


class StaleRowError(AssertionError):
    """A row that does not hold what its request knows would be read."""


class RequestState:
    """Rows [0, max_num_seqs) of everything that a step needs to know of a request.

    Args:
        max_num_seqs, max_model_len, block_size, vocab_size: sizes of the engine.
        device, stream: where steps run; None: on CPU, at once.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        device: torch.device | None = None,
        stream: Stream | None = None,
    ) -> None:
        self.block_size = block_size
        self.max_blocks = -(-max_model_len // block_size)
        self.admission = np.full(max_num_seqs, NOBODY, dtype=np.int64)  # whose row it is
        # [max_num_seqs, max_model_len] prompt + output; proposers get read-only views of it
        self.token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        # [max_num_seqs, max_blocks]; 0, the null block, where nothing is allocated
        self.block_table = np.zeros((max_num_seqs, self.max_blocks), dtype=np.int32)
        self.stop_ids = np.full((max_num_seqs, MAX_STOP_IDS), NO_STOP, dtype=np.int32)
        self.device = DeviceRows(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            device=device or torch.device("cpu"),
            stream=stream or InlineStream(),
        )
        # Steps that were launched with a row and whose tokens nobody has committed.
        self._num_unread = np.zeros(max_num_seqs, dtype=np.int32)

    @staticmethod
    def row_bytes(max_model_len: int, block_size: int) -> int:
        """Bytes of one request's rows, those of `device` apart."""
        return 4 * (max_model_len + -(-max_model_len // block_size) + MAX_STOP_IDS + 4)

    def follow(self, request: Request) -> None:
        """Bring the row of a running request up to date.

        May be repeated, and may break off anywhere: the row is the request's from the last line on.
        """
        row, admission = request.row, request.admission
        assert row is not None, f"{request} has no row"
        assert admission is not None, f"{request} was never admitted"
        first_block = request.kv_len // self.block_size  # blocks before it stay while it runs
        if self.admission[row] != admission or self.has_lost(request):
            self.admission[row] = NOBODY
            self.num_tokens[row] = first_block = 0
            self.stop_ids[row] = NO_STOP
            self.stop_ids[row, : len(request.stop_token_ids)] = sorted(request.stop_token_ids)
            self.device.start(row, request)
            self._num_unread[row] = 0
        known = int(self.num_tokens[row])
        self.token_ids[row, known : request.num_tokens] = request.token_ids[known:]
        self.num_tokens[row] = request.num_tokens
        block_ids = request.block_table.block_ids
        self.block_table[row, first_block : len(block_ids)] = block_ids[first_block:]
        self.block_table[row, len(block_ids) :] = 0
        self.admission[row] = admission

    def row_of(self, request: Request) -> int:
        """The row of a running request; StaleRowError where it is not up to date."""
        row = request.row
        if row is None or self.admission[row] != request.admission:
            raise StaleRowError(f"{request} has no row, or another's")
        if self.num_tokens[row] != request.num_tokens:
            raise StaleRowError(f"the row of {request} has {self.num_tokens[row]} tokens")
        return row

    def launched(self, requests: Iterable[Request]) -> None:
        """A step is about to change the rows of these on the device."""
        for request in requests:
            self._num_unread[self.row_of(request)] += 1

    def committed(self, request: Request) -> None:
        """The request has what the step gave it, so the row on the device holds what it knows."""
        assert request.row is not None, f"{request} has no row"
        self._num_unread[request.row] -= 1
        self.follow(request)

    def has_lost(self, request: Request) -> bool:
        """Whether the device's row has tokens of a step that is over and was never committed."""
        return bool(self._num_unread[request.row] > (request.num_in_flight > 0))

    def history(self, request: Request) -> IntArray:
        """The request's tokens so far, int32 [num_tokens], a read-only view."""
        view = self.token_ids[self.row_of(request), : request.num_tokens]
        view.flags.writeable = False
        return view
