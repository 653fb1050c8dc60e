"""Floors of acceptance, which may only rise, and what is held to them.

`floors.json` is written by hand, a little below what was measured when the weights were trained:
counts do not depend on the machine's speed, but the last bits of a target's sums may differ from
one kind of CPU to the next, and a text with them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from graphengine.bench.acceptance import Acceptance

_FLOORS = json.loads(Path(__file__).with_name("floors.json").read_text("utf-8"))
# Rows of proposer, temperature and floor; of proposer, workload, temperature and floor.
TINY: list[list[Any]] = _FLOORS["tiny"]
SMOLLM2: list[list[Any]] = _FLOORS["smollm2"]


def hold(found: Acceptance, floor: dict[str, Any]) -> None:
    """Fail where anything is below its floor.

    Args:
        floor: `mean_acceptance_length`, `rate`, and `conditional`, a share a place.
    """
    print(found)
    assert found.mean_acceptance_length >= floor["mean_acceptance_length"], found
    assert found.rate >= floor["rate"], found
    for place, least in enumerate(floor["conditional"]):
        assert found.conditional[place] >= least, f"place {place}: {found}"
