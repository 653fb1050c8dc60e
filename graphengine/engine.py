"""Engine: the step loop. Propose, verify and the KV budget meet here and nowhere else.

Owns the life of requests from `add_request` to their last output and the counters. One caller, one
step at a time; with `async_steps` one is launched before the one before has been read. Model, KV
and drafts are the runner's, the scheduler's and the proposer's.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from capture.stream import StreamError
from graphengine.admission import make_requests
from graphengine.commit import commit
from graphengine.config import EngineConfig
from graphengine.delivery import Delivery
from graphengine.drafting import Drafting
from graphengine.flights import Flights
from graphengine.kv.manager import KVManager
from graphengine.outputs import EngineStats, RequestOutput
from graphengine.request import RequestStatus
from graphengine.sampled import Sampled
from graphengine.sampling.params import SamplingParams
from graphengine.scheduler import PrefillChunk, Scheduler, StepPlan
from graphengine.self_check import check_drafts
from graphengine.speculative_config import SpeculativeConfig
from graphengine.startup import StartProgress, start
from graphengine.stats import StatsCounter
from graphengine.streams import OutputStream
from graphengine.tracing import COMMIT, SCHEDULE, STEP, span, traced
from proposers.base import Proposer


class Engine:
    """Serves requests by captured decode steps.

    Args:
        model: a Hugging Face directory, a .gguf file, or `smollm2-135m`.
        config: None: the defaults. `LLM` has the meaning of every field.
        progress: called with (phase, done, total, what) while weights load and cells are captured.
        proposer: an instance to use instead of the method of `config.speculative`, which must be
            given and still says the draft length; for tests.

    Raises:
        ValueError: the model or the configuration is refused.
    """

    def __init__(
        self,
        model: str | Path,
        config: EngineConfig | None = None,
        *,
        progress: StartProgress | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        assert proposer is None or isinstance(self.config.speculative, SpeculativeConfig), (
            "a proposer needs a draft length"
        )
        started = start(model, self.config, progress, proposer)
        resolved = self.resolved = started.resolved
        self.tokenizer = started.tokenizer
        self.sampling_defaults = started.sampling_defaults  # for callers: no step looks at them
        self.start_times = started.times
        self.runner = started.runner
        self.state = started.state
        self.kv = KVManager(
            num_blocks=resolved.num_blocks,
            block_size=resolved.sizes.block_size,
            enable_prefix_caching=resolved.scheduler.enable_prefix_caching,
            lookahead=resolved.sizes.lookahead,
        )
        self.scheduler = Scheduler(resolved.scheduler, self.kv)
        self.drafting = Drafting(
            started.proposer,
            self.state,
            self.runner,
            started.draft_length,
            vocab_size=resolved.model.vocab_size,
        )
        self.delivery = Delivery(self.scheduler.finish)
        self._counter = StatsCounter(max_draft_tokens=resolved.sizes.max_draft_tokens)
        self.flights = Flights(self.runner)
        self._seeds = random.Random(self.config.seed)  # of requests that bring none
        self._is_torn = False  # bookkeeping broke off half-way
        self._closed = False
        try:
            check_drafts(self)
        except ValueError:
            self.close()
            raise

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
    ) -> None:
        """Queue a request.

        Args:
            request_id: unique among unfinished requests.
            prompt: text, or token ids in [0, vocab_size).
            params: None: the defaults.
            cache_salt: not empty; cached prefixes are shared only among requests of the same salt,
                so that nobody can tell by the time an answer takes what another has asked. None is
                a salt of its own.

        Raises:
            ValueError: a bad prompt or parameter, an id in use, or a request that can never fit.
                Nothing is queued.
            RuntimeError: the engine is closed.
        """
        self._ready()
        requests = make_requests(
            request_id,
            prompt,
            params if params is not None else SamplingParams(),
            tokenizer=self.tokenizer,
            resolved=self.resolved,
            cache_salt=cache_salt,
        )
        streams = OutputStream.open_all(requests, self.tokenizer)
        self.delivery.check(requests)
        for request in requests:
            self.scheduler.check(request)  # refused before anything has changed
        with self._bookkeeping():
            drawn = self._seeds.getrandbits(64) if requests[0].params.seed is None else None
            for request in requests:
                if drawn is not None:
                    request.seed = drawn
                self.scheduler.add(request)
            self.delivery.add(streams)

    def has_unfinished_requests(self) -> bool:
        """Whether a step has something to run, or an output that no step has returned yet."""
        return self._is_torn or self.delivery.has_outputs or self.scheduler.has_unfinished_requests

    @traced(STEP)
    def step(self) -> list[RequestOutput]:
        """Run one step; returns the outputs of the requests that got tokens or finished.

        Raises:
            RuntimeError: the engine is closed, or (StreamError) a step failed on the device.

        What a proposer or a request's own function raises comes out too, as does Ctrl-C; a request
        then is as it was, or has what the step verified, which the next one delivers.
        """
        self._ready()
        try:
            self._run_step()
        except StreamError:
            self._is_torn = True  # of what was launched nobody knows what has run
            raise
        return self.delivery.take()

    def _run_step(self) -> None:
        most_in_flight = self._most_in_flight()
        if len(self.flights) > most_in_flight:
            self._land(most_in_flight)
        with self._bookkeeping(), span(SCHEDULE):
            plan = self.scheduler.schedule(self.drafting.length.ladder(self.scheduler.running))
            self._follow(plan)
        self._forget()  # before the proposer hears of who starts over
        self._prefill(plan.chunks)
        started = time.perf_counter()
        draft = self.drafting.propose(plan)
        draft_seconds = time.perf_counter() - started
        launched = self.flights.launch(plan.decodes, draft)
        self._counter.count_step(launched)
        self._land(most_in_flight if launched else 0)
        self.drafting.length.spent(time.perf_counter() - started, draft_seconds)

    def abort(self, request_id: str) -> bool:
        """Drop a request wherever it stands; False where the id is unknown or finished already.

        Its last output comes with the next step. Raises RuntimeError where the engine is closed.
        """
        self._ready()
        dropped = self._drop(self.delivery.unfinished(request_id))
        self._forget()
        return dropped

    def discard(self, request_ids: Iterable[str]) -> None:
        """Abort those of the requests that are unfinished, and deliver no output of any.

        Raises RuntimeError where there are some and the engine is closed.
        """
        ids = set(request_ids)
        if ids:
            self._ready()
        self._drop([one for request_id in ids for one in self.delivery.unfinished(request_id)])
        self.delivery.drop_outputs(ids)
        self._forget()

    def hand_back(self, outputs: Sequence[RequestOutput]) -> None:
        """Give back outputs that a step returned to a caller whose they are not.

        The next step delivers them, ahead of its own.
        """
        self.delivery.hand_back(outputs)

    @property
    def proposer(self) -> Proposer | None:
        """What drafts; None where nothing does. Another one of the host may take its place."""
        return self.drafting.proposer

    @proposer.setter
    def proposer(self, proposer: Proposer | None) -> None:
        self.drafting.proposer = proposer

    @property
    def draft_limit(self) -> int:
        """Most drafts that a step may carry now; 0 is off: the k = 0 cells serve every step.

        May be set between steps, up to the configured maximum. It changes speed, never a token
        (with `verification="rejection"`, tokens that are sampled, and never their distribution). A
        value between two captured lengths acts as the lower one.
        """
        return self.drafting.length.limit

    @draft_limit.setter
    def draft_limit(self, limit: int) -> None:
        self.drafting.length.limit = limit

    def reset_prefix_cache(self) -> int:
        """Forget cached prefixes that no request holds; returns the number of blocks.

        Raises RuntimeError where the engine is closed.
        """
        self._ready()
        return self.kv.pool.unpublish_free()

    def start_afresh(self) -> None:
        """Forget outputs, cached prefixes and counts, as if nothing had been served.

        Nothing may be running. Raises RuntimeError where the engine is closed.
        """
        self._ready()
        assert not self.scheduler.has_unfinished_requests, "requests are unfinished"
        self.flights.clear()
        self.delivery.take()
        self._forget()
        self.reset_prefix_cache()
        self.runner.manager.stats.forget_runs()
        self._counter = StatsCounter(max_draft_tokens=self.resolved.sizes.max_draft_tokens)

    def stats(self) -> EngineStats:
        """Counters since start. Raises RuntimeError where the engine is closed."""
        self._check_open()
        return self._counter.snapshot(self.runner, self.kv)

    def capture_report(self) -> str:
        """The shape table as captured, printable. Raises RuntimeError where it is closed."""
        self._check_open()
        return f"{self.runner.report()}\nnumerics {self.config.numerics}"

    def close(self) -> None:
        """Drop graphs, buffers, weights and KV, and unfinished requests; twice is fine."""
        if self._closed:
            return
        try:
            self._ready()
            self._drop(stream.request.request_id for stream in self.delivery.streams.values())
            self.delivery.take()
            self.flights.clear()
        finally:
            self._closed = True
            self.runner.close()
            del self.runner, self.flights
        try:
            self._forget()
        finally:
            self.drafting.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed; start another")

    def _ready(self) -> None:
        """Before anything that changes requests; RuntimeError where the engine is closed."""
        self._check_open()
        self.flights.recount(self.scheduler.running)  # a landing may have broken off
        # Rows that lack a step's tokens are written anew, but not below a step that builds on them.
        lost = len(self.flights) and any(map(self.state.has_lost, self.scheduler.running))
        if self._is_torn or lost:
            self._start_over()

    @contextmanager
    def _bookkeeping(self) -> Iterator[None]:
        """Around what changes queues, rows, blocks and outputs together.

        An exception leaves the mark: Ctrl-C may come between any two lines, and what half a change
        means to the other half is nothing to reason about.
        """
        self._is_torn = True
        yield
        self._is_torn = False

    def _start_over(self) -> None:
        """Keep the requests and their tokens, and give them everything else anew.

        What has been committed is in the next outputs, what has ended has its last.
        """
        self._is_torn = True  # until all of it is done, however often it breaks off
        self.flights.clear()
        for request in self.scheduler.start_over():
            if request.request_id not in self.delivery.streams:  # the call to add it broke off
                self.scheduler.finish(request, "abort")
        self.delivery.start_over()
        self._is_torn = False

    def _follow(self, plan: StepPlan) -> None:
        """Bring the persistent rows up to date with what the scheduler decided.

        The rows of all that run, not of what is new in the plan: a row knows what it lacks.
        """
        self._counter.num_preemptions += len(plan.preempted)
        self.delivery.leave(request.request_id for request in plan.preempted)
        for request in self.scheduler.running:
            self.state.follow(request)
            if request.metrics.first_scheduled_time is None:
                request.metrics.first_scheduled_time = time.perf_counter()

    def _prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        if not chunks:
            return
        self.runner.prefill(chunks)
        drafted = self.drafting.prefill(chunks) if self.draft_limit else None
        with self._bookkeeping():
            for index, chunk in enumerate(chunks):
                if chunk.request.status is not RequestStatus.PREFILL:
                    continue  # aborted meanwhile
                self.scheduler.advance_prefill(chunk)
                if drafted is not None:
                    self.kv.keep_draft_rows(chunk.request, int(drafted[index]))
                self._counter.num_prefill_tokens += chunk.num_tokens

    def _land(self, most_in_flight: int) -> None:
        """Commit and emit what the oldest step under way has brought, if there are too many."""
        is_due = len(self.flights) > most_in_flight
        sampled = self.delivery.cut(self.flights.land() if is_due else [])
        with self._bookkeeping(), span(COMMIT):
            self._commit(sampled)
            self.delivery.emit(self.scheduler.running)
        self._notify(sampled)

    def _most_in_flight(self) -> int:
        """How many steps may be under way; none where the host must see tokens before a launch."""
        everybody = (*self.scheduler.running, *self.scheduler.waiting)
        waits = self.drafting.waits or any(one.params.needs_tokens for one in everybody)
        return 0 if waits else self.config.async_steps

    def _commit(self, sampled: Sequence[Sampled]) -> None:
        """Tokens, KV rows, state rows and counters move together; rejected drafts end here."""
        for item in sampled:
            request = item.decode.request
            commit(
                self.kv,
                request,
                item.token_ids,
                item.num_draft_tokens,
                item.num_accepted,
                item.logprobs,
                item.draft_kv_len,
            )
            self.state.committed(request)
            self._counter.count_request(
                item.num_draft_tokens, item.num_accepted, len(item.token_ids)
            )

    def _drop(self, answer_ids: Iterable[str]) -> bool:
        """Abort these, and say whether one was unfinished. The proposer is still to be told."""
        with self._bookkeeping():
            dropped = [self.scheduler.abort(answer_id) for answer_id in list(answer_ids)]
            self.delivery.emit(request for request in dropped if request is not None)
        return any(dropped)

    def _notify(self, sampled: Sequence[Sampled]) -> None:
        """Tell the proposer what was committed and who is gone.

        Last of all, so that a proposer that raises here finds a finished step behind it.
        """
        try:
            self.drafting.on_commit(sampled)
        finally:
            self._forget()

    def _forget(self) -> None:
        """Tell the proposer who is gone: what has ended, and what is to start over."""
        self.drafting.forget(self.delivery.take_gone())
