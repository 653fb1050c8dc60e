"""Settings: what the sampler knows of each running request, in rows that steps read in place.

Owns the layout, that of `Settings` in kernels/settings.h, and the row that changes nothing.
"""

from __future__ import annotations

from typing import Final

import numpy as np

PENALTIES: Final = 1  # flags
MASK: Final = 2

DTYPE: Final = np.dtype(
    [
        ("temperature", "<f4"),  # 0: greedy
        ("top_p", "<f4"),
        ("min_p", "<f4"),
        ("repetition_penalty", "<f4"),
        ("frequency_penalty", "<f4"),
        ("presence_penalty", "<f4"),
        ("top_k", "<i4"),  # 0: off
        ("flags", "<i4"),
        ("seed", "<u8"),
        ("choice", "<u4"),
        ("num_bias", "<i4"),
    ]
)
NEUTRAL: Final = np.array((0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0, 0, 0, 0, 0), dtype=DTYPE)
