"""Case 57: what capture takes of the device's memory, by the number of cells, and again.

One pool serves all graphs, so many small cells must cost little beside the largest.
"""

from __future__ import annotations

import gc
from dataclasses import replace

import torch

from graphengine.engine import Engine
from tests.gpu.device import TARGET, DeviceSetup, draft_options, gpu

pytestmark = gpu
MIB = 1 << 20
SETUP = DeviceSetup(k=3, max_num_seqs=16, max_model_len=128, dtype="bfloat16", attention="triton")


def reserved() -> int:
    """Bytes that torch holds of the device, caches given back."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def captured(setup: DeviceSetup) -> tuple[Engine, int]:
    """An engine, and the bytes of its graphs."""
    engine = setup.start(TARGET, **draft_options("eagle3"))
    return engine, sum(engine.runner.manager.stats.num_bytes.values())


def test_growth_with_the_number_of_cells() -> None:
    found = {}
    for ladder in ((16,), (4, 8, 12, 16), tuple(range(1, 17))):
        setup = replace(SETUP, num_reqs=ladder, draft_lengths=(0, 3))
        engine, num_bytes = captured(setup)
        found[len(engine.runner.manager.stats.num_bytes)] = num_bytes
        engine.close()
        del engine
    (few, first), *_, (many, last) = sorted(found.items())
    print({cells: f"{num_bytes / MIB:.1f} MiB" for cells, num_bytes in found.items()})
    share = (many / few) / 2
    assert last <= max(first * share, first + 64 * MIB), "memory grows with the number of cells"


def test_capturing_again_takes_no_more() -> None:
    """A pool that outlives its engine, or a graph that nobody frees."""
    captured(replace(SETUP, num_reqs=(4, 16)))[0].close()
    before = reserved()
    for _ in range(2):
        engine, _ = captured(replace(SETUP, num_reqs=(4, 16)))
        engine.close()
        del engine
        assert reserved() <= before + 2 * MIB


def test_serving_takes_no_more() -> None:
    """Steps after start allocate nothing that stays."""
    engine, _ = captured(replace(SETUP, num_reqs=(4, 16)))

    def serve() -> None:
        for index in range(12):
            engine.add_request(str(index), list(range(10 + index)))
        while engine.has_unfinished_requests():
            engine.step()

    serve()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    serve()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before
    engine.close()
