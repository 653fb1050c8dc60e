"""Held: inputs made by hand for a proposer that carries a model, with the rows that an engine has.

The chain reads tokens where the captured steps keep them; here they are put there without a step.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from graphengine.engine import Engine
from proposers.base import ProposeInputs


def held(engine: Engine, inputs: ProposeInputs) -> ProposeInputs:
    """The inputs of requests that an idle engine holds in its first rows."""
    assert inputs.cache is not None, "where is their KV?"
    assert not engine.has_unfinished_requests(), "the rows are in use"
    rows = engine.state.device
    for row, tokens in enumerate(inputs.token_ids):
        rows.num_tokens[row] = len(tokens)
        rows.token_ids[row, : len(tokens)] = torch.from_numpy(tokens.copy())
    places = np.arange(inputs.num_reqs, dtype=np.int32)
    return replace(inputs, cache=replace(inputs.cache, state_rows=places))
