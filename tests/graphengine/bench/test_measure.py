"""The decode window, and pairs of runs on a tiny engine."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from graphengine.bench.measure import OWN, run_batch
from graphengine.bench.pairs import Difference, PairPlan, PairRunner, first_difference
from graphengine.bench.report import as_json, summarise
from graphengine.bench.steps import step_times
from graphengine.bench.workloads import Prompt
from graphengine.decode_timer import DecodeTimer
from graphengine.engine import Engine
from graphengine.outputs import AnswerLog, CompletionOutput, RequestOutput
from graphengine.request import RequestMetrics
from graphengine.resolve import GREEDY
from graphengine.sampling.params import SamplingParams
from proposers.mock import OracleProposer
from tests.graphengine.bench.conftest import CONFIG
from tests.tiny import VOCAB_SIZE

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
PROMPT = [5, 9, 200, 31, 77]


def _output(request_id: str, num_new_tokens: int) -> RequestOutput:
    completion = CompletionOutput(
        index=0, finish_reason=None, log=AnswerLog([], 0, []), num_tokens=0, num_texts=0
    )
    return RequestOutput(
        request_id=request_id,
        outputs=[completion],
        finished=False,
        new_text="",
        num_new_tokens=num_new_tokens,
        metrics=RequestMetrics(),
    )


def test_window_starts_when_the_last_request_has_a_token() -> None:
    """Guards against prefill time, or the tokens of the first step, inside a decode rate."""
    timer = DecodeTimer(2)
    timer.add([], 1.0)
    timer.add([_output("a", 4)], 2.0)
    timer.add([_output("a", 1), _output("b", 7)], 3.0)
    timer.add([_output("a", 2), _output("b", 1)], 5.0)
    timer.add([], 6.0)
    timer.add([_output("b", 3)], 7.0)
    assert timer.window == (4.0, 6)


@pytest.mark.parametrize("num_reqs", [1, 2])
def test_window_without_a_decode_step_is_empty(num_reqs: int) -> None:
    """Guards against a division by zero, or a rate, where one step emitted everything."""
    timer = DecodeTimer(num_reqs)
    timer.add([_output("a", 7)], 1.0)
    assert timer.window == (0.0, 0)


def test_draft_limit_limits_the_drafts_and_never_the_tokens(engine: Engine) -> None:
    """Guards against an "off" that still drafts, or runs in another cell than k = 0."""
    runs, cells = {}, {}
    for limit in (0, 1, 3):
        before = engine.stats().replays
        engine.draft_limit = limit
        runs[limit] = run_batch(engine, [PROMPT], PARAMS)
        after = engine.stats().replays
        cells[limit] = {key for key in after if after[key] > before.get(key, 0)}
    assert runs[0].token_ids == runs[1].token_ids == runs[3].token_ids
    assert cells[0] == {"1x1:greedy"}
    assert cells[1] == {"1x1:greedy", "1x2:greedy"}
    assert cells[3] > {"1x4:greedy"}
    assert runs[0].num_draft_tokens == 0
    assert 0 < runs[1].num_draft_tokens < runs[3].num_draft_tokens


def test_pairs_need_a_proposer(checkpoint: Path) -> None:
    """Guards against a comparison of off with off."""
    engine = Engine(checkpoint, replace(CONFIG, speculative=None))
    with pytest.raises(ValueError, match="speculation is off"):
        PairRunner(engine, max_tokens=4)
    engine.close()


def test_run_batch_keeps_the_order_and_counts_each_request(engine: Engine) -> None:
    """Guards against figures or streams of one request under another's name."""
    other = [40, 41, 42]
    both = run_batch(engine, [PROMPT, other], PARAMS)
    alone = [run_batch(engine, [prompt], PARAMS).token_ids[0] for prompt in (PROMPT, other)]
    assert both.token_ids == alone
    assert both.num_tokens == 48
    assert [len(origins) for origins in both.token_origins] == [24, 24]
    assert 24 < both.num_steps <= 48
    assert both.mean_acceptance_length == 48 / both.num_steps


def test_acceptance_of_perfect_drafts(engine: Engine) -> None:
    """Guards against a wrong numerator or denominator: every draft of the oracle is accepted."""
    off = run_batch(engine, [PROMPT], PARAMS)
    records = {tuple(PROMPT): off.token_ids[0]}
    engine.proposer = OracleProposer(vocab_size=VOCAB_SIZE, records=records)
    on = run_batch(engine, [PROMPT], PARAMS)
    assert on.token_ids == off.token_ids
    assert on.acceptance_rate == 1.0
    assert on.mean_acceptance_length == 24 / on.num_steps >= 3.4


def test_plan_runs_every_pair_and_alternates(engine: Engine) -> None:
    """Guards against missing cells of the table, and against one side always going first."""
    prompts = [
        Prompt(id=f"p{i}", kind="a", chat=False, text=f"some text number {i}") for i in range(3)
    ]
    plan = PairPlan(
        workloads={"w": prompts}, batch_sizes=[1, 2], draft_lengths=[1, 3], rounds=2, max_tokens=8
    )
    runner = PairRunner(engine, max_tokens=plan.max_tokens)
    done: list[int] = []
    pairs = runner.run_plan(plan, lambda: done.append(1))
    assert len(pairs) == len(done) == plan.num_pairs == (3 + 2) * 2 * 2
    assert all(pair.difference is None for pair in pairs)
    assert all(pair.off.num_draft_tokens == 0 for pair in pairs)
    for k in plan.draft_lengths:
        for number in range(plan.rounds):
            firsts = [pair.off_first for pair in pairs if (pair.k, pair.round) == (k, number)]
            assert firsts == [(index + number) % 2 == 0 for index in range(5)]
    summaries = summarise(pairs)
    assert [(s.batch_size, s.k, s.num_pairs) for s in summaries] == [
        (1, 1, 6),
        (1, 3, 6),
        (2, 1, 4),
        (2, 3, 4),
    ]
    assert all(s.num_identical == s.num_pairs for s in summaries)
    data = json.loads(json.dumps(as_json(pairs, [])))
    assert len(data["pairs"]) == plan.num_pairs
    assert data["pairs"][0]["ratio"] == pairs[0].on.rate / pairs[0].off.rate


def test_rounds_do_not_narrow_an_interval_over_prompts(engine: Engine) -> None:
    """Guards against repetitions of few prompts sold as evidence about many."""
    prompts = [Prompt(id=f"p{i}", kind="a", chat=False, text=f"text {i}") for i in range(2)]
    runner = PairRunner(engine, max_tokens=8)

    def interval(count: int) -> tuple[int, float]:
        plan = PairPlan(
            workloads={"w": prompts[:count]}, batch_sizes=[1], draft_lengths=[2], rounds=3,
            max_tokens=8,
        )  # fmt: skip
        pairs = runner.run_plan(plan)
        (summary,) = summarise(pairs)
        assert summary.ratio is not None
        ratios = [pair.ratio or 0.0 for pair in pairs if pair.prompt_ids == ["p0"]]
        assert min(summary.ratio.low, median(ratios)) == summary.ratio.low
        return summary.ratio.num_values, summary.ratio.coverage

    assert interval(2) == (2, 0.5)
    assert interval(1) == (3, 0.75)  # one prompt: the noise of its rounds


def test_rounds_of_sampled_answers_are_answers_of_their_own(engine: Engine) -> None:
    """Guards against seeds that repeat, and against a workload that is measured greedily."""
    prompt = Prompt(id="p", kind="a", text="some text", temperature=1.5)
    plan = PairPlan(
        workloads={"w": [prompt]}, batch_sizes=[1], draft_lengths=[2], rounds=3, max_tokens=8
    )
    pairs = PairRunner(engine, max_tokens=8).run_plan(plan)
    answers = {tuple(pair.off.token_ids[0]) for pair in pairs}
    assert len(answers) == 3
    assert all(pair.difference is None and pair.is_sampled for pair in pairs)


def test_rounds_end_when_the_interval_is_narrow_enough(engine: Engine) -> None:
    """Guards against endless rounds, and against an end before there are values for an interval."""
    prompt = Prompt(id="p", kind="a", text="some text")
    wide = PairPlan(
        workloads={"w": [prompt]},
        batch_sizes=[1],
        draft_lengths=[2, OWN],
        rounds=9,
        max_tokens=8,
        half_width=1e9,
    )
    runner = PairRunner(engine, max_tokens=8)
    pairs = runner.run_plan(wide)
    assert [pair.k for pair in pairs] == [2] * 6 + [OWN] * 6  # six values make an interval
    assert len(runner.run_plan(replace(wide, half_width=0.0))) == 18


def test_the_engines_own_policy_is_put_back(engine: Engine) -> None:
    """Guards against an engine that a comparison leaves with a fixed length, or with none."""
    length = engine.drafting.length
    policy = length.policy
    runner = PairRunner(engine, max_tokens=8)
    fixed = runner.run("w", [Prompt(id="p", kind="a", text="a b a b a b a b")], k=1)
    assert length.policy is policy
    assert fixed.off.num_draft_tokens == 0
    assert 0 < fixed.on.num_draft_tokens <= fixed.on.num_steps  # one draft a step


def test_first_difference_names_prompt_and_position() -> None:
    """Guards against a check that overlooks a longer stream, a later request or any token."""
    assert first_difference(["a", "b"], [[1, 2], [3]], [[1, 2], [3]]) is None
    found = first_difference(["a", "b"], [[1, 2], [3, 4]], [[1, 2], [3, 5]])
    assert found == Difference(prompt_id="b", position=1, off=4, on=5)
    longer = first_difference(["a"], [[1, 2]], [[1, 2, 3]])
    assert longer == Difference(prompt_id="a", position=2, off=None, on=3)


def test_step_times_leave_the_engine_as_it_was(engine: Engine) -> None:
    """Guards against timed steps that commit, leak blocks or disturb later answers."""
    before = run_batch(engine, [PROMPT], PARAMS)
    free = engine.stats().kv_blocks_free
    found = step_times(engine, batch_size=2, draft_lengths=[0, 1, 3], context=100, num_replays=3)
    assert [(step.k, step.context, step.num_replays) for step in found] == [
        (0, 100, 3),
        (1, 100, 3),
        (3, 100, 3),
    ]
    assert all(step.seconds > 0 for step in found)
    assert not engine.has_unfinished_requests()
    assert engine.stats().kv_blocks_free == free
    assert run_batch(engine, [PROMPT], PARAMS).token_ids == before.token_ids


def test_timed_rows_lie_in_blocks_of_their_own(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against steps that write to the null block, where a real one writes to the cache."""
    verify, size = engine.runner.verify, engine.kv.block_size
    slots: list[list[int]] = []

    def spy(rows: Any, draft: Any) -> Any:
        packed = verify(rows, draft)
        longest = int(draft.num_draft_tokens.max())
        key = engine.runner.manager.dispatch(len(rows), longest, GREEDY)
        slots.append(engine.runner.buffers.cell(key)["slot_mapping"].tolist())
        return packed

    monkeypatch.setattr(engine.runner, "verify", spy)
    context = 3 * size - 1  # prefill needs three blocks, the last two of the rows a fourth
    step_times(engine, batch_size=2, draft_lengths=[0, 3], context=context, num_replays=2)
    timed = [row for row in slots if len(row) == 2 * 4][-2:]
    assert len(timed) == 2
    for row in timed:
        assert min(row) >= size, "a draft in the null block"
        assert len(set(row)) == len(row), "two rows in one slot"


def test_step_times_refuse_a_context_that_does_not_fit(engine: Engine) -> None:
    """Guards against a figure for 2,000 tokens taken at fewer."""
    with pytest.raises(ValueError, match="at most 251 do"):
        step_times(engine, batch_size=1, draft_lengths=[3], context=300, num_replays=1)
