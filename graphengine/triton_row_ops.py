"""The step's first and last op on a GPU; the rule is that of `kernels/rows.cpp`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from capture.ops import CompiledOp
from graphengine.device_rows import DeviceRows
from graphengine.row_ops import PREPARED, PREPARED_FROM
from graphengine.triton_kernels.request_rows import commit_rows, prepare_rows

Tensor = torch.Tensor


class TritonRowOps:
    """See the module docstring.

    Args:
        rows: read and written in place; their tensors must outlive the graphs.
        block_size: of the cache.
    """

    def __init__(self, rows: DeviceRows, block_size: int) -> None:
        self._rows = rows
        self._block_size = block_size
        self._prepare = CompiledOp("prepare_rows", self._launch_prepare)
        self._commit = CompiledOp("commit_rows", self._launch_commit)

    def prepare(self, views: Mapping[str, Tensor]) -> None:
        """Write a cell's tokens, positions, slots, drafts and room."""
        self._prepare(*(views[name] for name in (*PREPARED, *PREPARED_FROM)))

    def commit(self, views: Mapping[str, Tensor]) -> None:
        """Append what a cell emits to the rows of its requests."""
        self._commit(views["packed"], views["state_rows"], len(views["block_table"]))

    def _launch_prepare(self, *buffers: Tensor) -> None:
        written, read = buffers[: len(PREPARED)], buffers[len(PREPARED) :]
        prepare_rows([*written], [*read], self._rows, block=self._block_size)

    def _launch_commit(self, packed: Tensor, state_rows: Tensor, num_reqs: int) -> None:
        commit_rows(packed, state_rows, self._rows, num_reqs)
