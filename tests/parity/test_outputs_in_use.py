"""What a step has given out is not overwritten before the host has read it (case 13).

A tape in debug mode puts NaN, or a number that no id has, into every output of target and chain
before each of its replays, so what is read too late, or written by the wrong graph, shows.
"""

from __future__ import annotations

import pytest

from graphengine.model_runner import MAX_PREFILL_ROWS
from graphengine.sampling.params import SamplingParams
from tests.graphengine.engine.harness import Harness
from tests.parity.test_capture_proof import TRAINED, K, start

pytestmark = pytest.mark.parity

LIMIT = MAX_PREFILL_ROWS  # rows of the largest forward
LENGTHS = (K, K + 1, K + 2, 8 * (K + 1) - 1, 8 * (K + 1), 8 * (K + 1) + 1)  # around cells, too
LONG = (LIMIT - 1, LIMIT, LIMIT + 1)
PARAMS = [
    SamplingParams(max_tokens=9, ignore_eos=True, prompt_logprobs=3, logprobs=2),
    SamplingParams(max_tokens=9, ignore_eos=True, prompt_logprobs=1, temperature=0.9, seed=4),
]


def serve(options: dict[str, object] | None, lengths: tuple[int, ...]) -> Harness:
    """All at once: some are in prefill while others draft and verify."""
    engine = start(options, max_model_len=LIMIT + 32, debug=options is not None)
    harness = Harness(engine)
    for index, length in enumerate(lengths):
        prompt = [(31 * index + 7 * place) % 250 for place in range(length)]
        harness.add(str(index), prompt, PARAMS[index % 2])
        harness.step()
    harness.drain()
    engine.close()
    return harness


@pytest.fixture(scope="module")
def plain() -> dict[tuple[int, ...], Harness]:
    """Speculation off, and nothing poisoned."""
    return {lengths: serve(None, lengths) for lengths in (LENGTHS, LONG)}


@pytest.mark.parametrize("lengths", [LENGTHS, LONG], ids=["cells", "forwards"])
@pytest.mark.parametrize("name", TRAINED)
def test_prompt_logprobs_are_those_of_plain_decoding(
    name: str, lengths: tuple[int, ...], plain: dict[tuple[int, ...], Harness]
) -> None:
    """Rows of a prompt read after a draft's forward has taken their storage."""
    found = serve(TRAINED[name], lengths).outputs
    for request_id, expected in plain[lengths].outputs.items():
        assert found[request_id].prompt_logprobs == expected.prompt_logprobs
        for mine, theirs in zip(found[request_id].outputs, expected.outputs, strict=True):
            assert mine.token_ids == theirs.token_ids
            assert mine.logprobs == theirs.logprobs


def test_outputs_of_one_step_outlive_the_next() -> None:
    """Ids, logprobs and text of a step that are views of what the next one writes."""
    harness = Harness(start({**TRAINED["eagle3"], "draft_sampling": "coupled"}))
    for index in range(3):
        params = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=2, seed=index)
        harness.add(str(index), [3 + index, 5, 8], params)
    kept, copies = [], []
    while harness.engine.has_unfinished_requests():
        outputs = harness.step()
        kept.append(outputs)
        copies.append([repr(one) for one in outputs])
    assert [[repr(one) for one in outputs] for outputs in kept] == copies
    harness.engine.close()
