"""Where a request ends: EOS at any place of a block, max_tokens, the context limit (1, 26, 27, 43).

The declare-an-EOS trick: a run without stops says what the model emits; one of those tokens is then
named a stop id, so that the event falls on a chosen place of the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from graphengine.sampling.params import SamplingParams
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Compile, Setup, scripted, with_torch_ops
from tests.tiny import VOCAB_SIZE

K = 4
SETUP = Setup(k=K)
PROMPT = (191, 44, 224)
MATE = (50, 60, 70, 80, 90)
FREE = SamplingParams(max_tokens=20, ignore_eos=True)


def answer(
    checkpoints: Checkpoints, prompt: Sequence[int] = PROMPT, compile_mode: Compile = "native"
) -> list[int]:
    """What speculation off emits."""
    setup = replace(SETUP, k=0, compile=compile_mode)
    harness = Harness(setup.start(checkpoints.get()))
    harness.add("a", prompt, FREE)
    harness.drain()
    return harness.stream("a")


@pytest.fixture(scope="module")
def free(checkpoints: Checkpoints, compile_mode: Compile) -> list[int]:
    """Twenty tokens after PROMPT, none of them twice, so that each names its place."""
    tokens = answer(checkpoints, compile_mode=compile_mode)
    assert len(set(tokens)) == len(tokens), "choose another prompt"
    return tokens


def run_oracle(
    checkpoints: Checkpoints,
    free: list[int],
    params: SamplingParams,
    *,
    eos: list[int] | None = None,
    compile_mode: Compile = "native",
) -> Harness:
    """PROMPT beside a mate that never stops, drafted from the free run."""
    records = {"a": [*PROMPT, *free], "mate": [*MATE, *answer(checkpoints, MATE, compile_mode)]}
    path = checkpoints.get() if eos is None else checkpoints.with_eos(eos)
    setup = replace(SETUP, compile=compile_mode)
    harness = Harness(setup.start(path, scripted("oracle", records)))
    harness.add("a", PROMPT, params)
    harness.add("mate", MATE, FREE)
    harness.drain()
    assert harness.stream("mate") == records["mate"][len(MATE) :], "a mate was disturbed"
    return harness


@pytest.mark.parametrize("offset", range(2 * K + 2))
@pytest.mark.parametrize("by", ["stop_token_ids", "config"])
@with_torch_ops
def test_stop_at_each_place_of_a_block(
    by: str, offset: int, compile_mode: Compile, checkpoints: Checkpoints, free: list[int]
) -> None:
    """Text that goes on after an EOS which was an accepted draft and not the bonus (case 1)."""
    stop = free[offset]
    if by == "config":
        params, eos = SamplingParams(max_tokens=20), [stop]
    else:
        params, eos = replace(FREE, stop_token_ids=(stop,)), None
    harness = run_oracle(checkpoints, free, params, eos=eos, compile_mode=compile_mode)
    assert harness.stream("a") == free[: offset + 1]
    assert harness.reason("a") == "stop"
    place = offset % (K + 1)
    origin = harness.outputs["a"].outputs[0].token_origins[-1]
    assert origin == ("bonus" if place == K else "accepted")
    steps = offset // (K + 1) + 1
    metrics = harness.outputs["a"].metrics
    assert metrics.num_steps == steps
    assert metrics.num_accepted_tokens == offset + 1 - (steps - 1) - (place == K)


@pytest.mark.parametrize("first", [0, 2, 5])
def test_two_eos_ids(first: int, checkpoints: Checkpoints, free: list[int]) -> None:
    """Only one of several EOS ids looked at, or not the earliest one."""
    eos = [free[first + 2], free[first]]
    harness = run_oracle(checkpoints, free, SamplingParams(max_tokens=20), eos=eos)
    assert harness.stream("a") == free[: first + 1]
    assert harness.reason("a") == "stop"


def test_ignore_eos_runs_on(checkpoints: Checkpoints, free: list[int]) -> None:
    """An EOS that stops although it is to be ignored; a stop id of the request that does not."""
    harness = run_oracle(checkpoints, free, FREE, eos=[free[2]])
    assert harness.stream("a") == free
    assert harness.reason("a") == "length"
    both = replace(FREE, stop_token_ids=(free[7],))
    harness = run_oracle(checkpoints, free, both, eos=[free[2]])
    assert harness.stream("a") == free[:8]
    assert harness.reason("a") == "stop"


def test_a_rejected_draft_of_eos_ends_nothing(checkpoints: Checkpoints, free: list[int]) -> None:
    """A request that is finished because its *draft* said EOS (case 1's twin)."""
    records = {"a": [*PROMPT, *free]}
    wrong = [(token + 1) % VOCAB_SIZE for token in free]  # what the script drafts instead
    stops = [token for token in wrong if token not in free]
    harness = Harness(SETUP.start(checkpoints.get(), scripted("junk", records)))
    harness.add("a", PROMPT, replace(FREE, stop_token_ids=tuple(stops)))
    harness.drain()
    assert harness.stream("a") == free
    assert harness.reason("a") == "length"
    assert harness.engine.stats().num_accepted_tokens == 0
    assert harness.engine.stats().num_draft_tokens > len(free)


@pytest.mark.parametrize("name", ["oracle", "junk", "ragged"])
@with_torch_ops
def test_max_tokens_is_exact(
    name: str, compile_mode: Compile, checkpoints: Checkpoints, free: list[int]
) -> None:
    """A block that is charged or emitted whole although it crosses max_tokens (26, 43)."""
    records = {str(n): [*PROMPT, *free] for n in range(1, 2 * K + 3)}
    setup = replace(SETUP, compile=compile_mode)
    harness = Harness(setup.start(checkpoints.get(), scripted(name, records)))
    for n in range(1, 2 * K + 3):
        harness.add(str(n), PROMPT, replace(FREE, max_tokens=n))
    harness.drain()
    for n in range(1, 2 * K + 3):
        assert harness.stream(str(n)) == free[:n]
        assert harness.reason(str(n)) == "length"
        metrics = harness.outputs[str(n)].metrics
        if name == "oracle":
            assert metrics.num_steps == -(-n // (K + 1))
        if name == "junk":
            assert metrics.num_steps == n


def test_eos_as_the_last_token_allowed(checkpoints: Checkpoints, free: list[int]) -> None:
    """`length` reported where EOS and max_tokens fall on the same token (case 43)."""
    for n in (1, K, K + 1, K + 2):
        params = replace(FREE, max_tokens=n, stop_token_ids=(free[n - 1],))
        harness = run_oracle(checkpoints, free, params)
        assert harness.stream("a") == free[:n]
        assert harness.reason("a") == "stop"


def test_max_tokens_one_drafts_nothing(checkpoints: Checkpoints) -> None:
    """A draft pass for a request that can take no draft (case 26)."""
    proposer = scripted("junk", {})
    harness = Harness(SETUP.start(checkpoints.get(), proposer))
    for index in range(3):
        harness.add(str(index), PROMPT, replace(FREE, max_tokens=1))
    harness.drain()
    assert proposer.num_proposals == 0
    assert harness.engine.stats().num_draft_tokens == 0
    assert all(len(harness.stream(str(index))) == 1 for index in range(3))
    assert {key.split("x")[1] for key in harness.engine.stats().replays} == {"1:greedy"}


@pytest.mark.parametrize("name", ["oracle", "junk", "ragged", "ngram"])
@with_torch_ops
def test_the_context_limit(name: str, compile_mode: Compile, checkpoints: Checkpoints) -> None:
    """Rows or positions at the limit, or a stream that ends beside it (case 27).

    The harness checks that no live row lies at max_model_len or beyond.
    """
    setup = Setup(k=8, compile=compile_mode, max_model_len=64, max_num_seqs=9)
    unlimited = SamplingParams(max_tokens=None, ignore_eos=True)
    prompts = {str(n): tuple((7 * n + i) % 256 for i in range(n)) for n in range(55, 64)}
    off = Harness(replace(setup, k=0).start(checkpoints.get()))
    for request_id, prompt in prompts.items():
        off.add(request_id, prompt, unlimited)
    off.drain()
    records = {key: [*prompts[key], *off.stream(key)] for key in prompts}
    proposer = None if name == "ngram" else scripted(name, records)
    harness = Harness(setup.start(checkpoints.get(), proposer))
    for request_id, prompt in prompts.items():
        harness.add(request_id, prompt, unlimited)
    harness.drain()
    for request_id, prompt in prompts.items():
        assert len(prompt) + len(harness.stream(request_id)) == 64
        assert harness.reason(request_id) == "length"
        assert harness.stream(request_id) == off.stream(request_id)
