"""A scheduler driven by a fake model, audited after every change.

The fake target's next token is a pure function of the prefix, so the right output of a request is
known without running anything: whatever the batch, the pool or the drafts do, a request must emit
exactly `expected_output`. Drafts are that truth up to a chosen number of tokens, then wrong. The
fake cache remembers which token of which prefix was written to which slot, and the fake target
refuses to answer over rows that hold anything else, as attention would silently not.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from graphengine.commit import commit
from graphengine.kv.auditor import audit
from graphengine.kv.manager import KVManager
from graphengine.request import Request, RequestStatus
from graphengine.sampling.params import SamplingParams
from graphengine.scheduler import ScheduledDecode, Scheduler, SchedulerConfig, StepPlan
from tests.graphengine.kv.build import slots

VOCAB = 97
EOS = 5
FULL_LADDER = (0, 1, 2, 3, 5, 6, 8)


def mix(state: int, token: int) -> int:
    return (state * 1_000_003 + token + 1) % 2_147_483_647


def prefix_states(tokens: Sequence[int]) -> list[int]:
    """Entry p stands for the whole prefix tokens[:p + 1], as a KV row does in a real cache."""
    return list(accumulate(tokens, mix, initial=17))[1:]


def answer(state: int) -> int:
    """The fake target: the next token after the prefix that `state` stands for."""
    return state % VOCAB


def expected_output(request: Request) -> list[int]:
    """What one-token-at-a-time decoding without a scheduler emits."""
    tokens = list(request.prompt_token_ids)
    state = prefix_states(tokens)[-1]
    while len(tokens) < request.limit:
        tokens.append(answer(state))
        state = mix(state, tokens[-1])
        if tokens[-1] in request.stop_token_ids:
            break
    return tokens[request.num_prompt_tokens :]


def expected_reason(request: Request) -> str:
    return "stop" if request.output_token_ids[-1] in request.stop_token_ids else "length"


def make_request(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int | None = 8,
    *,
    max_model_len: int = 64,
    stop_token_ids: tuple[int, ...] = (),
    ignore_eos: bool = True,
) -> Request:
    params = SamplingParams(
        max_tokens=max_tokens, stop_token_ids=stop_token_ids, ignore_eos=ignore_eos
    )
    return Request(request_id, prompt, params, max_model_len=max_model_len, eos_token_ids=(EOS,))


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 64,
    chunked: bool = True,
    caching: bool = True,
) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        enable_chunked_prefill=chunked,
        enable_prefix_caching=caching,
    )
    kv = KVManager(num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=caching)
    return Scheduler(config, kv)


def num_batched_tokens(plan: StepPlan) -> int:
    """Rows counted against the budget; padding of requests is not."""
    rows = len(plan.decodes) * (plan.k + 1)
    return rows + sum(chunk.num_tokens for chunk in plan.chunks)


@dataclass
class Simulation:
    """Runs steps of one scheduler and checks every promise that the plan makes."""

    scheduler: Scheduler
    ladder: tuple[int, ...] = FULL_LADDER
    seed: int = 0
    accept: int | None = None  # right drafts per step; None draws the number anew each time
    ragged: bool = False  # propose fewer drafts than allowed, at random
    requests: list[Request] = field(default_factory=list)
    # slot -> state of the prefix whose last token's KV lies there
    cache: dict[int, int] = field(default_factory=dict)
    num_steps: int = 0
    plans: list[StepPlan] = field(default_factory=list)
    started: list[str] = field(default_factory=list)  # request ids, each time one gets a row

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def add(self, request: Request) -> Request:
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def audit(self) -> None:
        # A finished request that kept a block shows as a reference without an owner.
        audit(self.scheduler.kv, [r for r in self.requests if not r.is_finished])

    def step(self) -> StepPlan:
        """One engine step with a fake model in the middle."""
        plan = self.schedule()
        self.run_chunks(plan)
        for decode in plan.decodes:
            self.run_decode(decode)
            self.audit()
        return plan

    def schedule(self) -> StepPlan:
        running = list(self.scheduler.running)
        before = {r.request_id: r.metrics.num_preemptions for r in self.requests}
        short = self.is_short_of_mandatory_rows()
        plan = self.scheduler.schedule(self.ladder)
        self.num_steps += 1
        self.plans.append(plan)
        self.started += [r.request_id for r in self.scheduler.running if r not in running]
        self.audit()
        self.check_plan(plan)
        assert bool(plan.preempted) == short, "preempted for something other than mandatory rows"
        preempted = {r.request_id for r in plan.preempted}
        for r in self.requests:
            grown = r.metrics.num_preemptions - before[r.request_id]
            assert grown == (r.request_id in preempted), f"{r} was preempted out of the plan"
            assert r.request_id not in preempted or r.status is RequestStatus.WAITING
        return plan

    def is_short_of_mandatory_rows(self) -> bool:
        """Whether one row for each decode and the oldest prefill exceeds what drafts leave free."""
        kv, running = self.scheduler.kv, self.scheduler.running
        prefills = [r for r in running if not r.is_decode_ready]
        mandatory = [r for r in running if r.is_decode_ready] + prefills[:1]
        free = kv.pool.num_free + sum(len(r.block_table) - kv.blocks_for(r.kv_len) for r in running)
        need = sum(kv.blocks_for(r.kv_len + 1) - kv.blocks_for(r.kv_len) for r in mandatory)
        return need > free

    def check_plan(self, plan: StepPlan) -> None:
        scheduler, config = self.scheduler, self.scheduler.config
        size = scheduler.kv.block_size
        assert plan.decodes or plan.chunks, "a step without work, with requests unfinished"
        assert num_batched_tokens(plan) <= config.max_num_batched_tokens
        assert len(scheduler.running) <= config.max_num_seqs
        longest = max((decode.max_draft_tokens for decode in plan.decodes), default=0)
        assert plan.k == min(k for k in self.ladder if k >= longest), "a cell wider than needed"
        rows = [r.row for r in scheduler.running]
        assert all(row is not None and 0 <= row < config.max_num_seqs for row in rows)
        arrivals = [r.arrival for r in (*scheduler.running, *scheduler.waiting)]
        assert arrivals == sorted(arrivals), "a request is served before an older one"
        for decode in plan.decodes:
            r = decode.request
            assert r.status is RequestStatus.DECODE
            assert r.row is not None
            assert 0 <= decode.max_draft_tokens <= plan.k
            assert r.num_tokens + decode.max_draft_tokens + 1 <= r.limit, "the bonus has no place"
            assert len(r.block_table) * size >= r.num_tokens + decode.max_draft_tokens, (
                "no lookahead slot"
            )
        for chunk in plan.chunks:
            r = chunk.request
            assert r.status is RequestStatus.PREFILL
            assert chunk.start == r.kv_len
            assert 1 <= chunk.num_tokens <= r.num_prefill_tokens
            assert len(r.block_table) * size >= chunk.start + chunk.num_tokens
            if not config.enable_chunked_prefill:
                assert chunk.num_tokens == r.num_prefill_tokens, "a prompt was split"

    def run_chunks(self, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            if chunk.request.is_finished:
                continue
            self.write(chunk.request, chunk.request.token_ids, chunk.start, chunk.num_tokens)
            self.scheduler.advance_prefill(chunk)
            self.audit()

    def propose(self, decode: ScheduledDecode) -> list[int]:
        """Right up to `accept` tokens, then wrong ones."""
        num_draft_tokens = decode.max_draft_tokens
        if self.ragged:
            num_draft_tokens = self.random.randint(0, num_draft_tokens)
        right = self.random.randint(0, num_draft_tokens) if self.accept is None else self.accept
        state = prefix_states(decode.request.token_ids)[-1]
        drafts: list[int] = []
        for index in range(num_draft_tokens):
            drafts.append(answer(state) if index < right else (answer(state) + 1) % VOCAB)
            state = mix(state, drafts[-1])
        return drafts

    def verify(self, request: Request, drafts: Sequence[int]) -> tuple[list[int], int]:
        """(sampled ids, cut at the first stop; drafts accepted among them)."""
        tokens = [*request.token_ids, *drafts]
        self.write(request, tokens, request.kv_len, 1 + len(drafts))
        self.check_cache(request, request.num_tokens)
        sampled: list[int] = []
        for index, state in enumerate(prefix_states(tokens)[request.kv_len :]):
            sampled.append(answer(state))
            matches = index < len(drafts) and sampled[-1] == drafts[index]
            if sampled[-1] in request.stop_token_ids or not matches:
                return sampled, index + matches
        raise AssertionError("the bonus row always ends the block")

    def run_decode(self, decode: ScheduledDecode) -> None:
        request = decode.request
        if request.is_finished:
            return
        drafts = self.propose(decode)
        sampled, num_accepted = self.verify(request, drafts)
        commit(self.scheduler.kv, request, sampled, len(drafts), num_accepted)
        assert request.kv_len == request.num_tokens - 1
        reason = request.check_finished()
        if reason is not None:
            self.scheduler.finish(request, reason)

    def write(self, request: Request, tokens: Sequence[int], start: int, num_rows: int) -> None:
        places = slots(self.scheduler.kv, request, start, start + num_rows)
        states = prefix_states(tokens)
        for position, slot in zip(range(start, start + num_rows), places, strict=True):
            assert slot >= self.scheduler.kv.block_size, "a live row in the null block"
            assert position < request.limit - 1, "a row past the limit"
            self.cache[slot] = states[position]

    def check_cache(self, request: Request, num_rows: int) -> None:
        states = prefix_states(request.token_ids)
        for position, slot in enumerate(slots(self.scheduler.kv, request, 0, num_rows)):
            assert self.cache[slot] == states[position], (
                f"{request} reads somebody else's KV at position {position}"
            )

    def drain(self, max_steps: int | None = None) -> None:
        """Steps until nothing is left; a run that makes no progress fails."""
        idle = 0
        while self.scheduler.has_unfinished_requests:
            before = self.progress()
            self.step()
            # Preemption takes progress back, so only steps without it are bound to advance.
            idle = 0 if self.progress() > before else idle + 1
            assert idle <= 3 + len(self.requests), "no token came out for several steps"
            if max_steps is not None:
                assert self.num_steps <= max_steps, f"still running after {max_steps} steps"

    def progress(self) -> int:
        """Emitted tokens and prefilled rows of the oldest request, which nothing takes back."""
        emitted = sum(r.num_output_tokens + r.is_finished for r in self.requests)
        oldest = min(
            (r for r in self.requests if not r.is_finished),
            key=lambda r: math.inf if r.arrival is None else r.arrival,
            default=None,
        )
        return emitted * 10_000 + (0 if oldest is None else oldest.kv_len)

    def check_outputs(self) -> None:
        """Every request that was not aborted emitted exactly the truth; no block is left."""
        for r in self.requests:
            assert r.is_finished
            expected = expected_output(r)
            if r.finish_reason == "abort":
                assert r.output_token_ids == expected[: r.num_output_tokens]
            else:
                assert r.output_token_ids == expected, f"{r} went wrong"
                assert r.finish_reason == expected_reason(r)
            m = r.metrics
            assert m.num_accepted_tokens <= m.num_draft_tokens
            assert m.num_drafts <= m.num_steps
            assert 0 <= r.num_output_tokens - m.num_accepted_tokens <= m.num_steps
        audit(self.scheduler.kv, self.requests)
        stats = self.scheduler.kv.stats()
        assert stats.num_used == 0
        assert stats.num_free == stats.num_blocks - 1
        if self.scheduler.kv.prefix_cache is None:
            assert stats.num_cached == 0
        assert sorted(self.scheduler._free_rows) == list(range(self.scheduler.config.max_num_seqs))
