"""Cells: where the host and a captured chain of drafts meet, and what the one tells the other.

Owns the views of each cell and the inputs that the host writes, padding included; what rows they
become is the chain's first op to say. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from capture.edge import HostViews
from capture.shapes import ShapeKey
from proposers.base import ProposeInputs, TokenArray
from proposers.chain import INPUTS, TOLD
from proposers.device import DraftRuntime, Rows
from proposers.requests import GREEDY, WORDS, write_requests

Tensor = torch.Tensor
Views = Mapping[str, Tensor]


def rows_of(runtime: DraftRuntime, views: Views, max_query_len: int | None = None) -> Rows:
    """Inputs of a forward over the views of a window."""
    tokens, positions, slots, table, starts = (views[name] for name in INPUTS)
    return runtime.rows(tokens, positions, slots, table, starts, max_query_len)


@dataclass(frozen=True, slots=True)
class Cell:
    """What the host reads and writes of a cell."""

    views: Views  # those of the window in the window's shape
    rows: Rows  # of the window
    drafts: Tensor  # [num_reqs, k + 1]
    probs: Tensor | None  # [num_reqs, k + 1, vocab]
    told: dict[int, HostViews] = field(default_factory=dict)  # by area of the edge


class Cells:
    """See the module docstring.

    Args:
        runtime: of the engine.
        width: rows a request of the window, by k.
    """

    def __init__(self, runtime: DraftRuntime, width: Callable[[int], int]) -> None:
        self._runtime = runtime
        self._width = width
        self._cells: dict[ShapeKey, Cell] = {}

    def window(self, num_reqs: int, k: int) -> Views:
        """Views of a window."""
        num_tokens = num_reqs * self._width(k)
        return self._runtime.buffers.prefill(num_reqs=num_reqs, num_tokens=num_tokens)

    def of(self, key: ShapeKey) -> Cell:
        """Views of a cell, made once: a step is too short to make them again."""
        if key not in self._cells:
            views = self._runtime.buffers.cell(key)
            window = self.window(key.num_reqs, key.query_len - 1)
            probs = views.get("draft.probs")
            shape = (key.num_reqs, key.query_len)
            self._cells[key] = Cell(
                views={**views, **{name: window[name] for name in INPUTS}},
                rows=rows_of(self._runtime, window),
                drafts=views["draft.drafts"].view(shape),
                probs=None if probs is None else probs.view(*shape, -1),
            )
        return self._cells[key]

    def tell(
        self, key: ShapeKey, inputs: ProposeInputs, counts: TokenArray, filled: TokenArray
    ) -> None:
        """Send a cell what its chain makes the rows of.

        Args:
            counts: [num_reqs], how many drafts are made of each request.
            filled: [num_reqs], leading slots whose draft KV is valid; see `CacheRows`.
        """
        cache, num_reqs, runtime = inputs.cache, inputs.num_reqs, self._runtime
        assert cache is not None, "requests without KV"
        assert cache.state_rows is not None, "requests without rows on the device"
        host = self._host(key)
        for name, values in (
            ("state_rows", cache.state_rows),
            ("allowed_drafts", counts),
            ("block_table", cache.block_table),
            ("draft.filled", filled),
        ):
            host[name][:num_reqs] = values
            host[name][num_reqs:] = runtime.buffers.specs[name].fill
        sampling = inputs.sampling or [GREEDY] * num_reqs
        requests = host["draft.requests"].reshape(key.num_reqs, WORDS)
        write_requests(requests, sampling, [0] * num_reqs)
        runtime.edge.send(self.of(key).views, host)
        runtime.plan(self.of(key).rows)

    def prepare(self, key: ShapeKey, variant: int) -> None:
        """Inputs of a plausible batch for capture: every row lives in the null block."""
        host = self._host(key)
        for name in host:
            if name not in ("query_start_loc", "draft.loop_start"):
                host[name][...] = self._runtime.buffers.specs[name].fill
        host["allowed_drafts"][: key.num_reqs] = (key.query_len - 1) * variant
        self._runtime.edge.send(self.of(key).views, host)
        self._runtime.stream.synchronize()

    def _host(self, key: ShapeKey) -> HostViews:
        """What is to be written and sent; where the rows of each request begin is there already."""
        edge, cell = self._runtime.edge, self.of(key)
        edge.begin()
        if edge.area not in cell.told:
            cell.told[edge.area] = edge.views(cell.views, TOLD)
        host, starts = cell.told[edge.area], np.arange(key.num_reqs + 1)
        host["query_start_loc"][:] = starts * self._width(key.query_len - 1)
        host["draft.loop_start"][:] = starts
        return host
