"""Frame: what a launched step gives, on its way to the host.

Owns the shapes of a step's outputs as the host reads them. Knows no requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from capture.edge import Reading
from capture.shapes import ShapeKey
from graphengine.request_state import IntArray


@dataclass(frozen=True, slots=True)
class Frame:
    """See the module docstring."""

    key: ShapeKey  # of the cell
    num_reqs: int  # live ones
    outputs: Reading
    likely: tuple[Reading, Reading, Reading] | None = None  # in the tiers that have them

    def packed(self) -> IntArray:
        """Wait for what was emitted.

        int32 [num_reqs, k_max + 3]: number of emitted tokens, how many of them were drafts, then
        their ids, -1 beyond. Where steps run at once it is valid until the next step.
        """
        found: IntArray = self.outputs.wait()[: self.num_reqs]
        return found

    def logprobs(self) -> tuple[npt.NDArray[Any], ...]:
        """Wait for ids, values and ranks, of a cell that has them.

        [num_reqs, query_len, MAX_LOGPROBS + 1] twice and [num_reqs, query_len]; valid as `packed`.
        """
        assert self.likely is not None, f"a cell without log-probabilities: {self.key}"
        shape = (self.key.num_reqs, self.key.query_len, -1)
        ids, values, ranks = (one.wait().reshape(shape)[: self.num_reqs] for one in self.likely)
        return ids, values, ranks[:, :, 0]
