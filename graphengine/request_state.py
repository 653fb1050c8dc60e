"""RequestState: the persistent rows of running requests, apart from the inputs of any step.

A request keeps its row from admission to its end or preemption, whatever batch it is in; a step
gathers from rows and never moves them. Host-side numpy; written on admission, schedule and commit,
read by the step batch and the proposers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from graphengine.request import Request
from graphengine.sampling.verifier import NO_STOP

MAX_STOP_IDS = 64

IntArray = npt.NDArray[np.int32]


class RequestState:
    """Rows [0, max_num_seqs) of everything that a step needs to know of a request."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.max_blocks = -(-max_model_len // block_size)
        # [max_num_seqs, max_model_len] prompt + output; proposers get read-only views of it
        self.token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        self.limit = np.zeros(max_num_seqs, dtype=np.int32)
        # [max_num_seqs, max_blocks]; 0, the null block, where nothing is allocated
        self.block_table = np.zeros((max_num_seqs, self.max_blocks), dtype=np.int32)
        self.stop_ids = np.full((max_num_seqs, MAX_STOP_IDS), NO_STOP, dtype=np.int32)

    @staticmethod
    def row_bytes(max_model_len: int, block_size: int) -> int:
        """Bytes of one request's rows."""
        return 4 * (max_model_len + -(-max_model_len // block_size) + MAX_STOP_IDS + 2)

    def admit(self, request: Request) -> None:
        """Take over everything of a request that has just got its row."""
        row = _row(request)
        self.token_ids[row, : request.num_tokens] = request.token_ids
        self.num_tokens[row] = request.num_tokens
        self.limit[row] = request.limit
        self.stop_ids[row] = NO_STOP
        self.stop_ids[row, : len(request.stop_token_ids)] = sorted(request.stop_token_ids)
        self._write_blocks(request, 0)

    def update_blocks(self, request: Request) -> None:
        """Follow the block table; its blocks below `kv_len` are fixed while a request runs."""
        self._write_blocks(request, request.kv_len // self.block_size)

    def append(self, request: Request, token_ids: list[int]) -> None:
        """Append committed tokens."""
        row = _row(request)
        start = self.num_tokens[row]
        self.token_ids[row, start : start + len(token_ids)] = token_ids
        self.num_tokens[row] = start + len(token_ids)

    def history(self, request: Request) -> IntArray:
        """The request's tokens so far, int32 [num_tokens], a read-only view."""
        view = self.token_ids[_row(request), : request.num_tokens]
        view.flags.writeable = False
        return view

    def _write_blocks(self, request: Request, first: int) -> None:
        row = self.block_table[_row(request)]
        block_ids = request.block_table.block_ids
        row[first : len(block_ids)] = block_ids[first:]
        row[len(block_ids) :] = 0


def _row(request: Request) -> int:
    assert request.row is not None, f"{request} has no row"
    return request.row
