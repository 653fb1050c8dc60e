"""Scheduler: who is let in, refused or made to wait, and how prompts are cut into chunks."""

import pytest

from graphengine.kv.manager import KVManager
from graphengine.request import RequestStatus
from graphengine.scheduler import Scheduler, SchedulerConfig
from tests.graphengine.scheduler.simulation import Simulation, make_request, make_scheduler


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_seqs", 0),
        ("max_num_seqs", True),
        ("max_num_batched_tokens", -1792),
        ("max_model_len", 1),
        ("max_model_len", 2.0),
    ],
)
def test_limits_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    """Guards against a config accepted at start that fails at the first request (case 41)."""
    good = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 8}
    with pytest.raises(ValueError, match=f"{field}={value!r}: expected an integer"):
        SchedulerConfig(**{**good, field: value})  # type: ignore[arg-type]


def test_contradicting_limits_are_refused_with_a_value_that_works() -> None:
    """Guards against a budget that starves a running request or a whole prompt for ever."""
    with pytest.raises(ValueError, match=r"max_num_batched_tokens=3: .*at least max_num_seqs=4"):
        make_scheduler(max_num_seqs=4, max_num_batched_tokens=3)
    with pytest.raises(ValueError, match=r"max_num_batched_tokens=63: .*at least max_model_len=64"):
        make_scheduler(max_num_batched_tokens=63, chunked=False)
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=8, max_model_len=8)
    kv = KVManager(num_blocks=8, block_size=4, enable_prefix_caching=False)
    with pytest.raises(ValueError, match=r"enable_prefix_caching=True .*False for the KV"):
        Scheduler(config, kv)


def test_a_request_that_can_never_run_is_refused_and_the_others_go_on() -> None:
    """Guards against a queue blocked for ever by its head (case 25)."""
    sim = Simulation(make_scheduler(num_blocks=9))
    fine = sim.add(make_request("fine", range(6), 4))
    with pytest.raises(ValueError, match=r"64 tokens and max_model_len is 64.*allowed is 63"):
        sim.scheduler.add(make_request("long", range(64), 1))
    with pytest.raises(ValueError, match=r"need 9 KV blocks of 4, and the pool has 8"):
        sim.scheduler.add(make_request("big", range(30), 4))
    with pytest.raises(ValueError, match="'fine': the id belongs to an unfinished request"):
        sim.scheduler.add(make_request("fine", range(6), 4))
    sim.add(make_request("just fits", range(30), 3))
    sim.drain()
    sim.check_outputs()
    assert fine.finish_reason == "length"
    sim.add(make_request("fine", range(6), 4))  # the id is free again
    sim.drain()


def test_rows_are_lowest_first_and_come_back() -> None:
    """Guards against two requests in one state row, and rows lost when requests finish."""
    sim = Simulation(make_scheduler(max_num_seqs=3))
    requests = [sim.add(make_request(str(i), [i, 1], 30)) for i in range(5)]
    sim.step()
    assert [r.row for r in requests] == [0, 1, 2, None, None]
    sim.scheduler.abort("1")
    sim.step()
    assert [r.row for r in requests] == [0, None, 2, 1, None]
    sim.drain()
    sim.check_outputs()


@pytest.mark.parametrize("chunk", [4, 5, 13])
def test_chunks_cover_the_prompt_but_its_last_token(chunk: int) -> None:
    """Guards against a token skipped or run twice at a chunk boundary (cases 28, 32)."""
    sim = Simulation(make_scheduler(max_num_seqs=1, max_num_batched_tokens=chunk))
    request = sim.add(make_request("a", range(13), 1))
    sim.drain()
    chunks = [c for plan in sim.plans for c in plan.chunks]
    covered = [p for c in chunks for p in range(c.start, c.start + c.num_tokens)]
    assert covered == list(range(12))
    assert all(c.request is request for c in chunks)
    sim.check_outputs()


def test_without_chunking_prompts_run_whole_and_in_order() -> None:
    """Guards against a prompt split behind the user's back, or overtaken for ever."""
    sim = Simulation(make_scheduler(max_num_batched_tokens=64, chunked=False, num_blocks=80))
    for i, length in enumerate((40, 63, 20, 2, 50)):
        sim.add(make_request(str(i), range(i, i + length), 6))
    sim.drain()
    sim.check_outputs()
    assert sim.started == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize("length", [1, 4, 8, 9])
def test_a_whole_cached_prompt_decodes_at_once(length: int) -> None:
    """Guards against zero scheduled tokens, or a double append, on a full hit (case 28)."""
    sim = Simulation(make_scheduler())
    first = sim.add(make_request("0", range(length), 7))
    sim.drain()
    for repeat in (1, 2):
        again = sim.add(make_request(str(repeat), range(length), 7))
        plan = sim.step()
        hits = (length - 1) // 4 * 4
        assert again.metrics.num_cached_tokens == hits <= length - 1
        if hits == length - 1:
            assert [decode.request for decode in plan.decodes] == [again]
            assert plan.chunks == []
        else:
            assert [(c.start, c.num_tokens) for c in plan.chunks] == [(hits, length - 1 - hits)]
        sim.drain()
        assert again.output_token_ids == first.output_token_ids
    sim.check_outputs()


def test_a_one_token_prompt_never_prefills() -> None:
    """Guards against an empty prefill chunk."""
    sim = Simulation(make_scheduler())
    request = sim.add(make_request("a", [3], 5))
    plan = sim.step()
    assert plan.chunks == []
    assert [decode.request for decode in plan.decodes] == [request]
    assert request.num_output_tokens >= 1


def test_a_newcomer_waits_rather_than_preempt_at_once() -> None:
    """Guards against letting in a prompt whose blocks running requests need next (case 25)."""
    sim = Simulation(make_scheduler(num_blocks=8, max_num_batched_tokens=8), ladder=(0,))
    old = sim.add(make_request("old", range(9), 12))  # 5 blocks in the end, 3 now
    while not old.num_output_tokens:
        sim.step()
    young = sim.add(
        make_request("young", range(50, 64), 2)
    )  # 4 blocks: fits now, not beside growth
    sim.step()
    assert young.status is RequestStatus.WAITING
    sim.drain()
    sim.check_outputs()
    assert all(r.metrics.num_preemptions == 0 for r in sim.requests)


def test_prefixes_shared_by_running_requests_count_once() -> None:
    """Guards against admission charging a newcomer for blocks that are already held."""
    sim = Simulation(make_scheduler(num_blocks=10, max_num_seqs=3), ladder=(0,))
    prompt = list(range(16))
    sim.add(make_request("0", [*prompt, 90], 3))
    sim.step()
    for name in "12":
        sim.add(make_request(name, [*prompt, 91 + int(name)], 3))
    sim.step()
    assert len(sim.scheduler.running) == 3
    assert sim.scheduler.kv.stats().num_used < 9
    sim.drain()
    sim.check_outputs()


def test_queue_is_served_in_order_of_arrival() -> None:
    """Guards against small requests overtaking a big one until it starves."""
    sim = Simulation(make_scheduler(num_blocks=12, max_num_seqs=4), ladder=(0, 3))
    sim.add(make_request("0", range(20), 8))
    sim.add(make_request("1", range(30, 50), 8))
    for i in range(2, 12):
        sim.add(make_request(str(i), [i], 4))
    sim.drain()
    started = [int(request_id) for request_id in sim.started]
    assert started == sorted(started)
    sim.check_outputs()
