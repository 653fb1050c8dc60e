"""Asynchronous stepping on the device: the streams of synchronous stepping.

The scripts and the checks of the CPU's test, which draws the device's delays; here it has its own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.gpu.device import TARGET, DeviceSetup, cases
from tests.parity.test_async import script, serve

SETUP = DeviceSetup(k=0, block_size=4, max_model_len=64, max_num_seqs=3, attention="triton")
SEEDS = {"cpu": range(1), "cuda": range(8)}


@pytest.mark.parity
@pytest.mark.parametrize(("device", "dtype"), cases(["float32"], ["float32", "bfloat16"]))
def test_streams_are_those_of_synchronous_stepping(device: str, dtype: str) -> None:
    """A late token in another request's row, a lost or doubled one, a block freed too early."""
    for seed in SEEDS[device]:
        setup = replace(
            SETUP,
            device=device,
            dtype=dtype,
            num_blocks=(18, 22, 40)[seed % 3],
            chunked=seed % 4 != 1,
            budget=None if seed % 4 == 1 else (8, 64)[seed % 2],
            prefix=seed % 5 != 2,
            debug=seed % 2 == 0,
        )
        asked = script(seed)
        truth = serve(setup.start(TARGET), asked, aborts=False)
        run = serve(replace(setup, async_steps=1).start(TARGET), asked, aborts=True)
        assert run.most_in_flight == 1
        for one in asked:
            found, wanted = run.tokens(one.request_id), truth.tokens(one.request_id)
            assert [w[: len(f)] for f, w in zip(found, wanted, strict=True)] == found, seed
            if one.aborts is None:
                assert found == wanted, (seed, one.request_id)
        truth.engine.close()
        run.engine.close()
