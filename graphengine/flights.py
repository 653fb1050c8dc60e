"""Flights: decode steps that were launched and whose tokens nobody has read yet.

Owns who was in a step and whether they still are when its tokens arrive: what comes late for a
request that has ended, been preempted or got its row anew is dropped here, once. Synchronous
stepping has one flight for an instant; asynchronous stepping launches the next before it lands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from capture.edge import Reading
from capture.shapes import ShapeKey
from graphengine.frame import Frame
from graphengine.model_runner import ModelRunner
from graphengine.request import Request, RequestStatus
from graphengine.request_state import IntArray
from graphengine.sampled import Sampled, read_sampled
from graphengine.scheduler import ScheduledDecode
from graphengine.tracing import VERIFY, traced
from proposers.base import Draft
from proposers.device_draft import DeviceDraft

NO_DRAFT_KV = -(1 << 31)  # slots ahead of no number of tokens


@dataclass(frozen=True, slots=True)
class Landed:
    """A step that has been read, for who watches."""

    key: ShapeKey  # of its cell
    draft: Draft
    # int32 [at least num_reqs, k or k + 1]: what was drafted, of a draft on the device too
    draft_token_ids: IntArray
    sampled: Sequence[tuple[int, Sampled]]  # with their rows; of requests that are still there


@dataclass(frozen=True, slots=True)
class _Flight:
    decodes: list[ScheduledDecode]
    admissions: list[int | None]  # of the requests when it was launched
    draft: Draft
    frame: Frame
    drafted: Reading | None = None  # of a draft on the device, while somebody watches

    def holds(self, index: int) -> bool:
        """Whether the request is still the one that was launched."""
        request = self.decodes[index].request
        same = request.admission == self.admissions[index]
        return same and request.status is RequestStatus.DECODE

    def num_rows(self, index: int) -> int:
        """Most tokens that it may bring."""
        return int(self.draft.num_draft_tokens[index]) + 1

    def draft_kv_ahead(self, index: int) -> int:
        """See `Request`; of a request that has no step behind this one."""
        draft = self.draft
        return int(draft.ahead[index]) if isinstance(draft, DeviceDraft) else NO_DRAFT_KV

    def landed(self, sampled: Sequence[tuple[int, Sampled]]) -> Landed:
        """All of it together; waits for drafts on the device."""
        drafted = self.draft.token_ids
        if isinstance(self.draft, DeviceDraft) and self.drafted is not None:
            drafted = self.drafted.wait()[self.draft.places]
        return Landed(self.frame.key, self.draft, drafted, sampled)


class Flights:
    """See the module docstring.

    Args:
        runner: launches steps.

    Attributes:
        watch: called with every step that has been read, before it is committed; None: nobody.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._flights: deque[_Flight] = deque()  # oldest first
        self.watch: Callable[[Landed], None] | None = None

    def __len__(self) -> int:
        return len(self._flights)

    @traced(VERIFY)
    def launch(self, decodes: Sequence[ScheduledDecode], draft: Draft) -> int:
        """Launch a step of every decode that is still alive; returns how many there are."""
        alive = [
            index
            for index, decode in enumerate(decodes)
            if decode.request.status is RequestStatus.DECODE
        ]
        if not alive:
            return 0
        found = [decodes[index] for index in alive]
        if len(alive) < len(decodes):
            draft = draft.rows(alive)
        requests = [decode.request for decode in found]
        admissions = [request.admission for request in requests]
        frame = self._runner.verify(requests, draft)
        drafted = None
        if self.watch is not None and isinstance(draft, DeviceDraft):
            drafted = self._runner.edge.read(draft.tokens)
        self._flights.append(_Flight(found, admissions, draft, frame, drafted))
        self.recount(requests)
        return len(alive)

    @traced(VERIFY)
    def land(self) -> list[Sampled]:
        """Wait for the oldest, and give what it brings to those that it still holds."""
        flight = self._flights[0]
        sampled = read_sampled(flight.decodes, flight.draft, flight.frame)
        self._flights.popleft()
        self.recount(decode.request for decode in flight.decodes)
        held = [(index, one) for index, one in enumerate(sampled) if flight.holds(index)]
        if self.watch is not None:
            self.watch(flight.landed(held))
        return [one for _, one in held]

    def recount(self, requests: Iterable[Request]) -> None:
        """Bring up to date how many tokens are on their way to each, and how much draft KV."""
        for request in requests:
            held = [
                (flight, index)
                for flight in self._flights
                for index, decode in enumerate(flight.decodes)
                if decode.request is request and flight.holds(index)
            ]
            request.num_in_flight = sum(flight.num_rows(index) for flight, index in held)
            if held:
                flight, index = held[-1]
                request.draft_kv_ahead = flight.draft_kv_ahead(index)

    def clear(self) -> None:
        """Forget all of them, once what is running has come to its end, well or not."""
        self._runner.stream.reset()
        self._runner.edge.forget()
        requests = [decode.request for flight in self._flights for decode in flight.decodes]
        self._flights.clear()
        self.recount(requests)
