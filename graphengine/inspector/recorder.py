"""Recorder: what each step did for each answer, as plain data, while an engine serves.

Owns the records and how a step's time is divided. Watches from outside, by the engine's flights and
the named phases of its steps: it decides nothing, and an engine without one pays a look at a flag.
Knows nothing of text or pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType

import torch

from graphengine.engine import Engine
from graphengine.flights import Landed
from graphengine.request import Request
from graphengine.sampled import Sampled
from graphengine.sampling.logprobs import Logprob
from graphengine.tracing import DRAFT, PLAN, PREFILL, STEP, VERIFY, listen


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A verify step: which graph ran, and where the engine's turn went.

    Seconds; `host` is all that is in none of the others: scheduling, inputs, bookkeeping, text.
    With asynchronous stepping the turn is that in which the step was read.
    """

    batch: int  # padded requests of the cell
    num_drafts: int  # k of the cell
    tier: str
    num_reqs: int  # answers that got tokens
    end: float  # on the clock of `perf_counter`
    draft: float
    verify: float
    prefill: float  # prompts read in the same turn
    host: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Visit:
    """What one step did for one answer."""

    step: int  # index of the step
    start: int  # tokens that the answer had before
    token_ids: list[int]  # accepted drafts first, then at most one of the target's own
    draft_ids: list[int]
    num_accepted: int
    # of each draft, where it was drawn from a distribution
    draft_probs: list[float] | None
    match_length: int | None  # see `Draft`
    logprobs: Sequence[Mapping[int, Logprob]]  # one a token where the request asks for them

    def cut(self, count: int) -> Visit:
        """The first `count` tokens: a stop string has taken the rest."""
        if count >= len(self.token_ids):
            return self
        return Visit(
            step=self.step,
            start=self.start,
            token_ids=self.token_ids[:count],
            draft_ids=self.draft_ids,
            num_accepted=min(self.num_accepted, count),
            draft_probs=self.draft_probs,
            match_length=self.match_length,
            logprobs=self.logprobs[:count],
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """A request, whose own lists hold the tokens, and the steps that brought them."""

    request: Request
    visits: Sequence[Visit]


@dataclass(slots=True)
class _Turn:
    """What is known of the engine's step in progress."""

    seconds: dict[str, float] = field(default_factory=dict)
    landed: list[Landed] = field(default_factory=list)


class Recorder:
    """Records as a context, all requests that an engine serves meanwhile.

    One engine of the process may step while one records. What it keeps grows with every step.

    Args:
        engine: idle.

    Attributes:
        steps: those that have been read so far.
        prefill_seconds: time spent on prompts.
    """

    def __init__(self, engine: Engine) -> None:
        self.steps: list[Step] = []
        self.prefill_seconds = 0.0
        self._engine = engine
        self._visits: dict[Request, list[Visit]] = {}  # in the order of their first tokens
        self._turn = _Turn()
        self._until = ExitStack()

    def __enter__(self) -> Recorder:
        flights = self._engine.flights
        assert flights.watch is None, "another recorder watches this engine"
        self._until.enter_context(listen(self._heard))
        self._until.callback(setattr, flights, "watch", None)
        flights.watch = self._saw
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._until.close()

    def answers(self) -> list[Answer]:
        """Every answer that got a token, as far as it has come."""
        found = []
        for request, visits in self._visits.items():
            count = request.num_output_tokens
            kept = [visit.cut(count - visit.start) for visit in visits if visit.start < count]
            ids = [token for visit in kept for token in visit.token_ids]
            assert ids == request.output_token_ids[: len(ids)], f"{request}: steps missed"
            found.append(Answer(request, kept))
        return found

    def _saw(self, landed: Landed) -> None:
        """A step has been read; its tokens are not in the requests yet."""
        number = len(self.steps) + len(self._turn.landed)
        self._turn.landed.append(landed)
        for row, sampled in landed.sampled:
            request = sampled.decode.request
            visits = self._visits.setdefault(request, [])
            # A commit that broke off: the step is made anew.
            while visits and visits[-1].start >= request.num_output_tokens:
                visits.pop()
            visits.append(_visit(number, landed, row, sampled))

    def _heard(self, phase: str, start: float, end: float) -> None:
        """A phase is over; after the outermost, so is the turn."""
        seconds = self._turn.seconds
        seconds[phase] = seconds.get(phase, 0.0) + end - start
        if phase != STEP:
            return
        turn, self._turn = self._turn, _Turn()
        self.prefill_seconds += seconds.get(PREFILL, 0.0)
        for landed in turn.landed:
            self.steps.append(_step(landed, seconds, end))
            seconds = {}  # of two that are read in one turn the first has it all


def _step(landed: Landed, seconds: Mapping[str, float], end: float) -> Step:
    draft, prefill = seconds.get(DRAFT, 0.0), seconds.get(PREFILL, 0.0)
    verify = seconds.get(VERIFY, 0.0) - seconds.get(PLAN, 0.0)  # planning is the host's
    return Step(
        batch=landed.key.num_reqs,
        num_drafts=landed.key.query_len - 1,
        tier=landed.key.tier,
        num_reqs=len(landed.sampled),
        end=end,
        draft=draft,
        verify=verify,
        prefill=prefill,
        host=max(0.0, seconds.get(STEP, 0.0) - draft - verify - prefill),
    )


def _visit(number: int, landed: Landed, row: int, sampled: Sampled) -> Visit:
    """A copy: arrays of a step may be written by the next."""
    draft, count = landed.draft, sampled.num_draft_tokens
    draft_ids = landed.draft_token_ids[row, :count].tolist()
    probs = None
    if draft.probs is not None and count:
        ids = torch.tensor(draft_ids)[:, None]
        probs = draft.probs[row, :count].gather(1, ids)[:, 0].tolist()
    return Visit(
        step=number,
        start=sampled.decode.request.num_output_tokens,
        token_ids=list(sampled.token_ids),
        draft_ids=draft_ids,
        num_accepted=sampled.num_accepted,
        draft_probs=probs,
        match_length=None if draft.match_lengths is None else int(draft.match_lengths[row]),
        logprobs=sampled.logprobs,
    )
