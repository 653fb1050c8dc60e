"""Window: which slots of a batch a draft model runs, and how they are written into its inputs.

A slot's row embeds the slot's own token, or the one behind it (`shift`). Knows nothing of models:
it turns histories and block tables into token ids, positions and slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from proposers.base import TokenArray

HostViews = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Layout:
    """What does not change between windows."""

    block_size: int
    max_model_len: int
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


def write_loop(
    views: HostViews,
    window: Window,
    num_rows: Sequence[int],
    layout: Layout,
) -> None:
    """Fill where the drafts' own rows lie: behind the window, one for each step and request.

    Args:
        views: `draft.loop_positions` and `draft.loop_slots`, each [steps, num_reqs of the cell].
        num_rows: [num_reqs], how many of them count; what the others compute reaches nobody, and
            they have no slot.
    """
    size, num_reqs = layout.block_size, len(num_rows)
    num_steps = len(views["draft.loop_slots"])
    places = window.ends + np.arange(num_steps, dtype=np.int32)[:, None]  # [steps, num_reqs]
    positions = np.minimum(places, layout.max_model_len - 1)
    blocks = np.take_along_axis(window.block_table, positions.T // size, axis=1).T
    is_live = places < window.ends + np.array(num_rows, dtype=np.int32)
    slots = np.where(is_live, blocks * size + positions % size, 0)
    for name, values in (("loop_positions", positions), ("loop_slots", slots)):
        views[f"draft.{name}"][...] = 0
        views[f"draft.{name}"][:, :num_reqs] = values
