"""The step's first and last op on CPU: inputs out of the requests' rows, and rows out of outputs.

Owns the kernels' arguments; `kernels/rows.cpp` has the rule.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from graphengine.device_rows import DeviceRows
from graphengine.kernels.ops import check_contiguous, native_op


class NativeRowOps:
    """See the module docstring.

    Args:
        rows: read and written in place; their tensors must outlive the graphs.
        block_size: of the cache.
    """

    def __init__(self, rows: DeviceRows, block_size: int) -> None:
        self._rows = rows
        self._block_size = block_size
        self._prepare = native_op("prepare_rows")
        self._commit = native_op("commit_rows")

    def prepare(self, views: Mapping[str, torch.Tensor]) -> None:
        """Write a cell's tokens, positions, slots, drafts and room."""
        rows, table = self._rows, views["block_table"]
        written = [views[name] for name in PREPARED]
        read = [views[name] for name in PREPARED_FROM]
        check_contiguous(*written, *read)
        num_reqs, max_blocks = table.shape
        self._prepare(
            *written,
            *read,
            rows.num_tokens,
            rows.limits,
            rows.token_ids,
            len(views["state_rows"]),
            num_reqs,
            len(views["token_ids"]) // num_reqs,
            rows.max_model_len,
            max_blocks,
            self._block_size,
            rows.padding_row,
        )

    def commit(self, views: Mapping[str, torch.Tensor]) -> None:
        """Append what a cell emits to the rows of its requests."""
        rows, packed = self._rows, views["packed"]
        check_contiguous(packed, views["state_rows"])
        self._commit(
            rows.token_ids,
            rows.num_tokens,
            rows.sampler.counts,
            packed,
            views["state_rows"],
            rows.sampler.settings,
            len(views["block_table"]),
            packed.shape[1],
            rows.max_model_len,
            rows.sampler.vocab_size,
            rows.padding_row,
        )


PREPARED = ("token_ids", "positions", "slot_mapping", "num_draft_tokens", "max_new_tokens")
PREPARED_FROM = (
    "state_rows",
    "allowed_drafts",
    "most_new_tokens",
    "draft_token_ids",
    "block_table",
)
