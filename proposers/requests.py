"""How a batch's drafts are to be drawn, as the captured choice reads it: a row a request.

The same fields as DraftRequest in the engine's kernels; seeds are two words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from proposers.base import RequestSampling

REQUEST: Final = np.dtype(
    [
        ("temperature", "<f4"),  # 0: greedy
        ("seed_low", "<u4"),
        ("seed_high", "<u4"),
        ("choice", "<u4"),
        ("num_tokens", "<i4"),  # position of the first draft; a chain's first op writes it
    ]
)
WORDS: Final = REQUEST.itemsize // 4
GREEDY: Final = RequestSampling(temperature=0.0, seed=0)


def write_requests(
    out: npt.NDArray[np.int32], sampling: Sequence[RequestSampling], num_tokens: Sequence[int]
) -> None:
    """Fill the rows of out [num_rows, WORDS]; rows beyond the requests are greedy at 0."""
    rows = np.zeros(len(out), dtype=REQUEST)
    for index, (one, length) in enumerate(zip(sampling, num_tokens, strict=True)):
        low, high = one.seed & 0xFFFFFFFF, one.seed >> 32
        rows[index] = (one.temperature, low, high, one.choice, length)
    out[:] = rows.view(np.int32).reshape(len(out), WORDS)
