"""`enable_chunked_prefill=False`: a prompt runs in one step, whatever its neighbours do."""

from __future__ import annotations

import pytest

from capture.config import CaptureConfig
from graphengine.config import CacheConfig, EngineConfig
from graphengine.models.loader import open_model
from graphengine.resolve import MAX_PREFILL_ROWS, resolve
from graphengine.sampling.params import SamplingParams
from graphengine.scheduler import PrefillChunk
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.setups import Setup

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
LENGTHS = (387, 2, 300, 1, 150, 240)


@pytest.mark.parametrize("budget", [None, 400])
@pytest.mark.parametrize("num_blocks", [None, 130])
def test_prompts_run_whole(
    budget: int | None, num_blocks: int | None, checkpoints: Checkpoints
) -> None:
    """A prompt that is cut by the budget, the pool, drafts of others or the size of a forward."""
    setup = Setup(
        k=3,
        chunked=False,
        max_model_len=400,
        max_num_seqs=3,
        budget=budget,
        num_blocks=num_blocks,
        prefix=False,
    )
    engine = setup.start(checkpoints.get())
    prefill, chunks = engine.runner.prefill, []

    def spy(step: list[PrefillChunk]) -> None:
        chunks.extend((c.request.request_id, c.start, c.num_tokens) for c in step)
        prefill(step)

    engine.runner.prefill = spy  # type: ignore[method-assign, assignment]
    for index, length in enumerate(LENGTHS):
        engine.add_request(str(index), [(7 * index + i) % 250 for i in range(length)], PARAMS)
    last = {}
    while engine.has_unfinished_requests():
        last.update((out.request_id, out) for out in engine.step())
    assert max(LENGTHS) > MAX_PREFILL_ROWS, "no prompt takes several forwards"
    assert sum(out.metrics.num_preemptions for out in last.values()) == 0
    assert chunks == [(str(i), 0, n - 1) for i, n in enumerate(LENGTHS) if n > 1]
    assert all(len(out.outputs[0].token_ids) == 12 for out in last.values())


def test_the_default_budget_takes_the_longest_prompt(checkpoints: Checkpoints) -> None:
    """A default that no prompt of full length fits beside the rows of running requests."""
    config = EngineConfig(
        max_num_seqs=2000,
        max_model_len=500,
        capture=CaptureConfig(num_reqs=(1, 2000)),
        cache=CacheConfig(enable_chunked_prefill=False),
    )
    resolved = resolve(open_model(checkpoints.get()).config, config)
    assert resolved.scheduler.max_num_batched_tokens == 2500
