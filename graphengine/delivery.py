"""Delivery: outputs from what was committed to whoever calls `step`, each once.

Owns the streams of unfinished requests, the outputs that no step has returned yet, and the list of
those who are gone, which a proposer must be told. Ends requests that have reached their end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set

from graphengine.outputs import RequestOutput
from graphengine.request import FinishReason, Request, answer_id
from graphengine.sampled import Sampled
from graphengine.streams import OutputStream
from graphengine.tracing import EMIT, traced


class Delivery:
    """See the module docstring.

    Args:
        finish: takes an unfinished request out of the scheduler.
    """

    def __init__(self, finish: Callable[[Request, FinishReason], None]) -> None:
        self._finish = finish
        # Of unfinished requests, by id; of one that has several answers, until all have ended.
        self.streams: dict[str, OutputStream] = {}
        self._undelivered: list[RequestOutput] = []
        self._gone: list[str] = []

    @property
    def has_outputs(self) -> bool:
        """Whether there are some that no step has returned yet."""
        return bool(self._undelivered)

    def check(self, requests: Iterable[Request]) -> None:
        """Raises ValueError where the id of one belongs to a request with an unfinished answer."""
        for request in requests:
            if request.request_id in self.streams:
                raise ValueError(
                    f"request {request.request_id!r}: the id belongs to an unfinished request; "
                    "use another"
                )

    def add(self, streams: Iterable[OutputStream]) -> None:
        """All answers to a prompt, at once: Ctrl-C leaves all of them or none."""
        self.streams.update({stream.request.request_id: stream for stream in streams})

    def unfinished(self, request_id: str) -> list[str]:
        """Ids of the answers to a request that have not ended; none where it is unknown."""
        stream = self.streams.get(request_id)
        if stream is None or stream.request.choice:
            return []
        requests = [one.request for one in stream.answers]
        return [request.request_id for request in requests if not request.is_finished]

    def cut(self, sampled: Sequence[Sampled]) -> list[Sampled]:
        """End blocks at stop strings, which only text can show: as if nothing came after them."""
        kept = []
        for item in sampled:
            request = item.decode.request
            count = self.streams[request.request_id].num_to_stop(item.token_ids)
            request.stop_length = None if count is None else request.num_tokens + count
            kept.append(item if count is None else item.cut(count))
        return kept

    @traced(EMIT)
    def emit(self, requests: Iterable[Request]) -> None:
        """Make outputs of what was committed, and end what has reached its end."""
        ended = []
        for request in list(requests):
            stream, reason = self.streams[request.request_id], request.check_finished()
            if reason is not None and not request.is_finished:
                self._finish(request, reason)
            if stream.is_behind:
                output, progress = stream.next_output()
                self._undelivered.append(output)
                stream.progress = progress
            if request.is_finished:
                self._gone.append(request.request_id)
                ended.append(stream)
        for stream in ended:
            self._let_go(stream)

    def _let_go(self, stream: OutputStream) -> None:
        """Forget a request once all its answers have ended; may break off, and be repeated."""
        if all(one.progress.ended for one in stream.answers):
            for one in stream.answers:
                self.streams.pop(one.request.request_id, None)

    def start_over(self) -> None:
        """After an `emit` that broke off: every request is as new, and no output is made twice."""
        self._undelivered = [out for out in self._undelivered if self._has_counted(out)]
        self.emit([stream.request for stream in self.streams.values()])
        self._gone += self.streams

    def take(self) -> list[RequestOutput]:
        """What has not been delivered; it has now."""
        outputs, self._undelivered = self._undelivered, []
        return outputs

    def hand_back(self, outputs: Iterable[RequestOutput]) -> None:
        """Put outputs that were taken before all others."""
        self._undelivered[:0] = outputs

    def drop_outputs(self, request_ids: Set[str]) -> None:
        self._undelivered = [out for out in self._undelivered if out.request_id not in request_ids]

    def leave(self, request_ids: Iterable[str]) -> None:
        """These lose what a proposer knows of them, though they go on."""
        self._gone += request_ids

    def take_gone(self) -> list[str]:
        """Who has ended, or starts over, since the last time."""
        gone, self._gone = self._gone, []
        return gone

    def _has_counted(self, output: RequestOutput) -> bool:
        """False for an output whose `emit` broke off behind it: it is made again."""
        stream = self.streams.get(answer_id(output.request_id, output.index))
        return stream is None or stream.has_counted(output)
