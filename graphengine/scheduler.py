"""Scheduler: who runs this step, with how many rows, and who yields when the pool is dry.

Owns the queues, the state rows and the order of service: first come, first served, and under
pressure the last to arrive yields to everybody before it. One token budget covers prefill chunks
and decodes, each decode counted as `k + 1` rows. Knows nothing of models, drafts' origin or graphs;
blocks are the KV manager's.

Why it cannot get stuck: running requests are older than waiting ones; the oldest running request is
preempted by nobody, gets its row first, and alone it always fits (`add` refuses it otherwise).
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from graphengine.kv.manager import KVManager
from graphengine.request import FinishReason, Request, RequestStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one engine.

    Args:
        max_num_seqs: requests that run at once; each holds one state row.
        max_num_batched_tokens: rows per step, prefill tokens and `k + 1` per decode together.
        max_model_len: context limit, prompt and output together.
        enable_chunked_prefill: split prompts over steps. Without it a prompt must fit one step.
        enable_prefix_caching: reuse the KV of prompts seen before.

    Raises:
        ValueError: a limit is out of range, or two of them contradict each other.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        for name, minimum in (
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("max_model_len", 2),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
                raise ValueError(f"{name}={value!r}: expected an integer >= {minimum}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens}: every running request "
                f"needs a row a step; raise it to at least max_num_seqs={self.max_num_seqs}"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens}: without chunked prefill a "
                "prompt runs in one step; raise it to at least "
                f"max_model_len={self.max_model_len} or enable chunked prefill"
            )


@dataclass(slots=True)
class ScheduledDecode:
    """A decode-ready request and the drafts that it may carry this step, in [0, k]."""

    request: Request
    max_draft_tokens: int


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens [start, start + num_tokens) of a request, to be run through prefill this step."""

    request: Request
    start: int
    num_tokens: int


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """What one step runs.

    Rows for everything in it are reserved; a reservation lasts until commit, `advance_prefill` or
    the next `schedule()`, whichever comes first.
    """

    k: int = 0  # widest cell of the ladder this step may use
    decodes: list[ScheduledDecode] = field(default_factory=list)
    chunks: list[PrefillChunk] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)  # lost row and blocks this step


class Scheduler:
    """Continuous batching over one KV pool.

    Args:
        config: limits.
        kv: blocks; built with the same `enable_prefix_caching`.

    Raises:
        ValueError: config and `kv` disagree about prefix caching.
    """

    def __init__(self, config: SchedulerConfig, kv: KVManager) -> None:
        if config.enable_prefix_caching != (kv.prefix_cache is not None):
            raise ValueError(
                f"enable_prefix_caching={config.enable_prefix_caching} for the scheduler and "
                f"{kv.prefix_cache is not None} for the KV manager; give both the same"
            )
        self.config = config
        self.kv = kv
        self.waiting: deque[Request] = deque()  # oldest first
        self.running: list[Request] = []  # oldest first
        self._requests: dict[str, Request] = {}  # unfinished, by id
        self._free_rows = list(range(config.max_num_seqs))  # a heap: lowest row first
        self._num_arrived = 0
        self._num_admitted = 0

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queues a new request.

        Raises:
            ValueError: its id is in use, or it can never be served within the context limit or the
                pool.
        """
        self.check(request)
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self._requests[request.request_id] = request
        self.waiting.append(request)

    def check(self, request: Request) -> None:
        """What `add` refuses, and in the same words; changes nothing."""
        name = f"request {request.request_id!r}"
        if request.request_id in self._requests:
            raise ValueError(f"{name}: the id belongs to an unfinished request; use another")
        assert request.arrival is None, f"{request} has been added before"
        max_model_len = self.config.max_model_len
        assert request.limit <= max_model_len, f"{request} exceeds max_model_len {max_model_len}"
        if request.num_prompt_tokens >= max_model_len:
            raise ValueError(
                f"{name}: the prompt has {request.num_prompt_tokens} tokens and max_model_len is "
                f"{max_model_len}, which leaves no room to answer; the longest prompt allowed is "
                f"{max_model_len - 1}"
            )
        # The last token emitted never enters the cache.
        needed, usable = self.kv.blocks_for(request.limit - 1), self.kv.pool.num_usable
        if needed > usable:
            raise ValueError(
                f"{name}: {request.num_prompt_tokens} prompt tokens and up to "
                f"{request.limit - request.num_prompt_tokens} output tokens need {needed} KV "
                f"blocks of {self.kv.block_size}, and the pool has {usable}; shorten the prompt, "
                f"lower max_tokens or raise the number of blocks"
            )

    def abort(self, request_id: str) -> Request | None:
        """Drops a request wherever it stands; None where it is unknown or finished already."""
        request = self._requests.get(request_id)
        if request is not None:
            self.finish(request, "abort")
        return request

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Ends an unfinished request and gives back its row and all its blocks."""
        assert self._requests.get(request.request_id) is request, f"{request} is not unfinished"
        was_waiting = request.status is RequestStatus.WAITING
        request.finish_reason = reason
        request.status = RequestStatus.FINISHED  # what breaks off behind this has ended it
        if was_waiting:
            self.waiting.remove(request)
        else:
            self._leave_running(request)
        del self._requests[request.request_id]

    def preempt(self, request: Request) -> None:
        """Sends a running request back to the front of the queue, to be recomputed.

        It keeps its tokens and loses row, blocks and reservations; a result that was under way for
        it cannot be committed any more.
        """
        self._leave_running(request)
        request.status = RequestStatus.WAITING
        request.metrics.num_preemptions += 1
        # Older than all that wait, so this is the front.
        insort(self.waiting, request, key=_arrival)

    def start_over(self) -> list[Request]:
        """Forgets all but requests and their tokens; returns the unfinished ones, all waiting.

        For a change to queues, rows or blocks that broke off half-way: whatever it has left, it is
        all given anew. Costs a recompute of everything and the prefix cache.
        """
        everybody = sorted(self._requests.values(), key=_arrival)
        self.kv.start_over(everybody)
        for request in everybody:
            request.metrics.num_preemptions += request.row is not None
            request.row = None
            if not request.is_finished:
                request.status = RequestStatus.WAITING
        unfinished = [request for request in everybody if not request.is_finished]
        self._requests = {request.request_id: request for request in unfinished}
        self.waiting, self.running = deque(unfinished), []
        self._free_rows = list(range(self.config.max_num_seqs))
        return unfinished

    def advance_prefill(self, chunk: PrefillChunk) -> None:
        """Records that a chunk has run. Must not be called once its request has been dropped."""
        request = chunk.request
        assert request.status is RequestStatus.PREFILL, f"chunk of {request}, not in prefill"
        assert request.kv_len == chunk.start, f"chunk at {chunk.start} is out of date: {request}"
        self.kv.advance_prefill(request, chunk.num_tokens)
        self._set_running_status(request)

    def schedule(self, draft_ladder: Sequence[int]) -> StepPlan:
        """Plans the next step.

        Order of claims on the pool: every running decode's one row (preempting later arrivals if
        need be), newcomers that fit with room to spare, prefill chunks, and only then drafts.

        Args:
            draft_ladder: draft lengths that may be used this step, ascending, 0 first.

        Returns:
            A plan that has neither decodes nor chunks only where no request is unfinished, or
            where all wait for the end of steps under way.
        """
        ladder = list(draft_ladder)
        assert ladder[:1] == [0], f"draft ladder {ladder} must start with 0"
        assert ladder == sorted(set(ladder)), f"draft ladder {ladder} must ascend"
        plan = StepPlan()
        for request in self.running:
            self.kv.trim(request)  # rows of a step that was never committed
        self._ensure_mandatory_rows(plan)
        if not plan.preempted:
            self._admit()
        decodes = [one for one in self.running if one.is_decode_ready and one.may_step]
        plan.k = self._widest_cell(ladder, decodes)
        self._plan_chunks(plan, self.config.max_num_batched_tokens - len(decodes) * (plan.k + 1))
        self._plan_drafts(plan, decodes)
        plan.k = _smallest_cell(ladder, max((d.max_draft_tokens for d in plan.decodes), default=0))
        return plan

    def _leave_running(self, request: Request) -> None:
        assert request.row is not None, f"{request} is not running"
        self.running.remove(request)
        heapq.heappush(self._free_rows, request.row)
        request.row = None
        self.kv.release(request)

    def _set_running_status(self, request: Request) -> None:
        ready = request.is_decode_ready
        request.status = RequestStatus.DECODE if ready else RequestStatus.PREFILL

    def _ensure_mandatory_rows(self, plan: StepPlan) -> None:
        """Gives each decode and the oldest prefill one row, oldest first, preempting the newest.

        Younger prefills take what is left when chunks are planned; they need not preempt, since
        they only have to run once they are the oldest.
        """
        prefill_served = False
        for request in [one for one in self.running if one.may_step]:
            if request.row is None:
                continue  # preempted just now
            if not request.is_decode_ready:
                if prefill_served:
                    continue
                prefill_served = True
            while not self.kv.reserve_rows(request, request.num_in_flight + 1):
                victim = self.running[-1]
                assert len(self.running) > 1 or victim is not request, (
                    f"{request} does not fit the pool on its own"
                )
                self.preempt(victim)
                plan.preempted.append(victim)
                if victim is request:
                    break

    def _admit(self) -> None:
        """Moves requests from the head of the queue to running while rows and blocks allow."""
        num_decodes = sum(request.is_decode_ready for request in self.running)
        pending = sum(request.num_prefill_tokens for request in self.running)
        while self.waiting and self._free_rows:
            request = self.waiting[0]
            if self._waits_for_prompt(request):
                return
            prefix = self.kv.find_prefix(request)
            prefill = request.num_prefill_tokens - len(prefix) * self.kv.block_size
            room = self.config.max_num_batched_tokens - num_decodes - pending
            # Unchunked, the newcomer runs whole in this very step or waits. Chunked, it is let in
            # while there may be budget to start it.
            smallest_start = 1 if self.config.enable_chunked_prefill else max(1, prefill)
            if room < smallest_start or not self._has_blocks_for(request, prefix):
                return
            self.waiting.popleft()
            self._start(request)
            pending += request.num_prefill_tokens
            num_decodes += request.is_decode_ready

    def _waits_for_prompt(self, request: Request) -> bool:
        """Another answer to its prompt is about to cache what it would compute once more."""
        first = self._requests.get(request.asked_id) if request.choice else None
        shares = self.kv.prefix_cache and request.num_prefill_tokens >= self.kv.block_size
        return bool(shares and first is not None and first.status is RequestStatus.PREFILL)

    def _has_blocks_for(self, request: Request, prefix: Sequence[int]) -> bool:
        """Whether the newcomer fits beside what the running requests will need soon.

        It must fit whole, last token's row included, although only a first chunk is taken now; and
        each running request keeps the rest of its own prompt and one block to grow by. Otherwise it
        would be let in only to preempt or be preempted at once.
        """
        pool = self.kv.pool
        available = pool.num_free - sum(pool.ref_count(block) == 0 for block in prefix)
        claims = 0
        for other in self.running:
            soon = self.kv.blocks_for(other.num_tokens + other.num_in_flight) + 1
            most = self.kv.blocks_for(other.limit - 1)
            claims += max(0, min(soon, most) - len(other.block_table))
        return self.kv.blocks_for(request.num_tokens) - len(prefix) + claims <= available

    def _start(self, request: Request) -> None:
        num_cached = self.kv.match_prefix(request)
        if request.metrics.num_preemptions == 0:
            request.metrics.num_cached_tokens = num_cached
        request.admission = self._num_admitted
        self._num_admitted += 1
        request.row = heapq.heappop(self._free_rows)
        insort(self.running, request, key=_arrival)
        self._set_running_status(request)
        if request.is_decode_ready:
            ensured = self.kv.reserve_rows(request, 1)
            assert ensured, f"{request} was let in without a block for its row"

    def _widest_cell(self, ladder: list[int], decodes: list[Request]) -> int:
        """Largest draft length that budget and limits allow; 0 where prefill needs the room.

        While prefill waits, drafts leave it half of the budget, or all it can use if that is less;
        without chunks it needs all of it. k = 0 always fits: there are at most `max_num_seqs` rows.
        """
        pending = sum(request.num_prefill_tokens for request in self.running)
        budget = self.config.max_num_batched_tokens
        if self.config.enable_chunked_prefill:
            pending = min(pending, budget // 2)
        wanted = max((request.max_draft_tokens for request in decodes), default=0)
        fitting = [k for k in ladder if len(decodes) * (k + 1) <= budget - pending]
        return min(max(fitting, default=0), _smallest_cell(ladder, wanted))

    def _plan_chunks(self, plan: StepPlan, budget: int) -> None:
        for request in self.running:
            rows = min(request.num_prefill_tokens, budget)
            if rows <= 0:
                continue
            granted = self.kv.reserve_prefill(request, rows)
            if granted:
                plan.chunks.append(PrefillChunk(request, request.kv_len, granted))
                budget -= granted

    def _plan_drafts(self, plan: StepPlan, decodes: list[Request]) -> None:
        """Shares the blocks that are left among the decodes, one block each a round.

        The first round hands out what the tables have room for already, so that a scarce pool does
        not give one request a full draft and the others none.
        """
        plan.decodes = [ScheduledDecode(request, 0) for request in decodes]
        size = self.kv.block_size
        hungry = plan.decodes if plan.k else []
        extra = 0
        while hungry:
            still_hungry = []
            for decode in hungry:
                request = decode.request
                known = request.num_tokens + request.num_in_flight
                slack = request.block_table.capacity(size) - known
                target = min(plan.k, slack if extra == 0 else slack + size)
                before = decode.max_draft_tokens
                granted = self.kv.reserve_speculative(request, target)
                decode.max_draft_tokens = granted
                most = min(plan.k, request.max_draft_tokens)
                if granted < most and (extra == 0 or granted > before):
                    still_hungry.append(decode)
            hungry, extra = still_hungry, extra + 1


def _arrival(request: Request) -> int:
    assert request.arrival is not None, f"{request} was never added"
    return request.arrival


def _smallest_cell(ladder: list[int], num_draft_tokens: int) -> int:
    """Smallest draft length of the ladder that is at least that, or the largest there is."""
    return next((k for k in ladder if k >= num_draft_tokens), ladder[-1])
