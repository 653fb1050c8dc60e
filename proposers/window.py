"""Window: which slots of a batch a draft model runs, and how they are written into its inputs.

A slot's row embeds the slot's own token, or the one behind it (`shift`). Knows nothing of models:
it turns histories and block tables into token ids, positions and slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from capture.edge import HostViews
from proposers.base import TokenArray


@dataclass(frozen=True, slots=True)
class Layout:
    """What does not change between windows."""

    block_size: int
    shift: int  # 0: a slot's row embeds its own token; 1: the one behind it
    num_embeddings: int  # ids from here on are embedded as the last id


@dataclass(frozen=True, slots=True)
class Window:
    """Slots [starts, ends) of each request, none where they are equal."""

    token_ids: Sequence[TokenArray]
    block_table: TokenArray  # [num_reqs, max_blocks]
    starts: TokenArray  # [num_reqs]
    ends: TokenArray  # [num_reqs]

    def within(self, most_rows: int) -> Window:
        """As many of the slots, in order, as there may be rows."""
        left = np.maximum(self.ends - self.starts, 0)
        takes = np.clip(most_rows - (np.cumsum(left) - left), 0, left)
        return replace(self, ends=(self.starts + takes).astype(np.int32))

    def part(self, chosen: npt.NDArray[Any], starts: TokenArray, ends: TokenArray) -> Window:
        """Other slots of some of the requests."""
        token_ids = [self.token_ids[index] for index in chosen]
        return Window(token_ids, self.block_table[chosen], starts, ends)


def write_rows(
    views: HostViews,
    window: Window,
    query_start_loc: npt.NDArray[Any],
    layout: Layout,
    depth: int = 0,
) -> None:
    """Fill the rows of a window: tokens, where they are, whose.

    Args:
        query_start_loc: [num_reqs + 1 or more], where each request's rows begin.
        depth: how many tokens further on the rows' tokens are, for deeper layers.
    """
    size = layout.block_size
    views["block_table"][: len(window.starts)] = window.block_table
    views["query_start_loc"][: len(query_start_loc)] = query_start_loc
    for index, (start, end) in enumerate(zip(window.starts, window.ends, strict=True)):
        slots = np.arange(start, end, dtype=np.int32)
        first = query_start_loc[index]
        part = slice(first, first + len(slots))
        tokens = window.token_ids[index][slots + layout.shift + depth]
        views["token_ids"][part] = np.minimum(tokens, layout.num_embeddings - 1)
        views["positions"][part] = slots
        blocks = window.block_table[index, slots // size]
        views["slot_mapping"][part] = blocks * size + slots % size
