"""Several threads: engines beside each other, and calls of one LLM."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from graphengine.llm import LLM
from graphengine.sampling.params import SamplingParams
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.setups import Graph, Setup

PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
PROMPTS = [[(7 * index + i) % 256 for i in range(10 + index)] for index in range(4)]


@pytest.fixture
def fast_switches() -> Iterator[None]:
    """Threads that take turns every few bytecodes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def start(checkpoints: Checkpoints, graph: Graph = "tape") -> LLM:
    config = Setup(graph=graph, k=3).config()
    return LLM(
        checkpoints.get("loopy"),
        max_model_len=64,
        max_num_seqs=4,
        speculative=config.speculative,
        capture=config.capture,
        cache=config.cache,
    )


def answers(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]


def together(*calls: Callable[[], list[list[int]]]) -> list[list[list[int]]]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(60) for future in [pool.submit(call) for call in calls]]


@pytest.mark.parametrize("graph", ["tape", "compiled", "eager"])
def test_an_engine_serves_while_others_start(
    graph: Graph, checkpoints: Checkpoints, fast_switches: None
) -> None:
    """Calls of one engine that end on the tape of another, and never run: wrong tokens."""
    with start(checkpoints, graph) as serving:
        expected, stop = answers(serving), Event()

        def start_others() -> list[list[int]]:
            for _ in range(3):
                with start(checkpoints) as other:
                    served = answers(other)
            stop.set()
            return served

        def serve() -> list[list[int]]:
            while not stop.is_set():
                serving.engine.reset_prefix_cache()
                served = answers(serving)
                assert served == expected
            return served

        assert together(start_others, serve) == [expected, expected]


def test_generate_from_several_threads(checkpoints: Checkpoints, fast_switches: None) -> None:
    """Requests that two callers step at once, or that one caller takes from the other."""
    with start(checkpoints) as llm:
        expected = answers(llm)
        assert together(*[lambda: answers(llm)] * 4) == [expected] * 4


def test_close_waits_for_a_call_of_another_thread(checkpoints: Checkpoints) -> None:
    """Graphs and weights that are freed under a running step."""
    llm = start(checkpoints)
    expected, step, running = answers(llm), llm.engine.step, Event()

    def signalling() -> object:
        running.set()
        return step()

    llm.engine.step = signalling  # type: ignore[method-assign, assignment]
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(answers, llm)
        assert running.wait(60)
        llm.close()
        assert served.result(60) == expected
    with pytest.raises(RuntimeError, match="closed"):
        answers(llm)
