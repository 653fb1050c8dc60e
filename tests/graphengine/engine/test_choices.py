"""Several answers to one prompt: n > 1."""

from __future__ import annotations

import pytest

from graphengine.engine import Engine
from graphengine.llm import LLM
from graphengine.outputs import RequestOutput
from graphengine.sampling.params import SamplingParams
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.setups import Setup

PROMPT = [5, 6, 7, 5, 6]


def params(n: int, **fields: object) -> SamplingParams:
    chosen: dict[str, object] = {"max_tokens": 12, "temperature": 1.0, "seed": 3, **fields}
    return SamplingParams(n=n, **chosen)  # type: ignore[arg-type]


def run(engine: Engine) -> list[RequestOutput]:
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


@pytest.mark.parametrize("seed", [3, None])
def test_the_first_of_n_is_the_only_one_of_one(checkpoints: Checkpoints, seed: int | None) -> None:
    """Choices that share noise, or a first one that moves when there are others."""
    answers = {}
    for n in (1, 4):
        for k in (0, 3):
            engine = Setup(k=k, max_num_seqs=3).start(checkpoints.get())
            engine.add_request("a", PROMPT, params(n, seed=seed))
            last = run(engine)[-1]
            answers[n, k] = [completion.token_ids for completion in last.outputs]
            assert [completion.index for completion in last.outputs] == list(range(n))
            engine.close()
    assert answers[4, 0] == answers[4, 3]
    assert answers[1, 0] == answers[1, 3] == [answers[4, 0][0]]
    assert len({tuple(ids) for ids in answers[4, 0]}) == 4


def test_outputs_of_a_step_add_up(checkpoints: Checkpoints) -> None:
    """Text, tokens or an end of one answer that is told of another, twice or never."""
    engine = Setup(k=3, max_num_seqs=2).start(checkpoints.get())
    engine.add_request("a", PROMPT, params(3, logprobs=1))
    outputs = run(engine)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    last = outputs[-1]
    for completion in last.outputs:
        mine = [output for output in outputs if output.index == completion.index]
        assert "".join(output.new_text for output in mine) == completion.text
        assert sum(output.num_new_tokens for output in mine) == len(completion.token_ids) == 12
        assert completion.logprobs is not None
        assert len(completion.logprobs) == 12
        ends = [output.outputs[completion.index].finish_reason for output in mine]
        assert ends == [None] * (len(mine) - 1) + ["length"]
    accepted = sum(one.token_origins.count("accepted") for one in last.outputs)
    assert last.metrics.num_accepted_tokens == accepted
    engine.close()


def test_abort_and_ids(checkpoints: Checkpoints) -> None:
    """An answer that runs on after abort, an id in use while one answer still runs, a part id."""
    engine = Setup(max_num_seqs=2).start(checkpoints.get())
    engine.add_request("a", PROMPT, params(3))
    for taken in ("a", "a#1"):
        with pytest.raises(ValueError, match=f"request '{taken}': the id belongs to an unfinished"):
            engine.add_request(taken, PROMPT)
    engine.step()
    assert not engine.abort("a#1")
    while not any(output.outputs[0].finish_reason for output in engine.step()):
        pass
    with pytest.raises(ValueError, match="request 'a': the id belongs to an unfinished"):
        engine.add_request("a", PROMPT)  # its first answer has ended, others have not
    assert engine.abort("a")
    assert not engine.abort("a")
    last = run(engine)[-1]
    assert last.finished
    assert [one.finish_reason for one in last.outputs] == ["length", "length", "abort"]
    assert engine.kv.stats().num_used == 0
    assert not engine.delivery.streams
    engine.add_request("a", PROMPT, params(1))
    engine.discard(["a"])
    assert run(engine) == []
    engine.close()


def test_generate_gives_every_answer(checkpoints: Checkpoints) -> None:
    """An LLM that returns with the first answer, or mixes up prompts."""
    config = Setup(k=2).config()
    with LLM(checkpoints.get(), speculative=config.speculative, max_model_len=64) as llm:
        outputs = llm.generate([PROMPT, [9, 9]], [params(3), params(1)])
    assert [len(output.outputs) for output in outputs] == [3, 1]
    assert all(len(one.token_ids) == 12 for output in outputs for one in output.outputs)
    assert outputs[0].prompt_token_ids == PROMPT


@pytest.mark.parametrize("budget", [None, 10])
def test_a_prompt_is_prefilled_once(checkpoints: Checkpoints, budget: int | None) -> None:
    """A prompt computed once for each of its answers, or answers that wait for ever."""
    prompt = list(range(30))
    engine = Setup(max_num_seqs=5, budget=budget).start(checkpoints.get())
    engine.add_request("a", prompt, params(4))
    engine.add_request("b", [9], params(2))
    last = {output.request_id: output for output in run(engine)}
    assert engine.stats().num_prefill_tokens == 29 + 3 * 1  # 28 of 29 are in full blocks
    assert last["a"].metrics.num_cached_tokens == 3 * 28
    alone = Setup(prefix=False).start(checkpoints.get())
    alone.add_request("a", prompt, params(4))
    streams = [one.token_ids for one in run(alone)[-1].outputs]
    assert streams == [one.token_ids for one in last["a"].outputs]
    for one in (engine, alone):
        one.close()


def test_greedy_choices_are_refused() -> None:
    """Four equal answers for the price of four."""
    with pytest.raises(ValueError, match=r"SamplingParams\.n=4: expected 1 where temperature is 0"):
        SamplingParams(n=4)
    with pytest.raises(
        ValueError, match=r"SamplingParams\.n=0: expected an integer >= 1 and <= 128"
    ):
        SamplingParams(n=0, temperature=1.0)
