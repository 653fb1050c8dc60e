"""Output streams: what is kept of a request for its outputs alone, and the outputs made of it.

Owns text and the clock readings that belong to delivery. Tokens and their origins are the
request's; nothing here can change one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from graphengine.models.detokenizer import IncrementalDetokenizer
from graphengine.models.tokenizer import Tokenizer
from graphengine.outputs import AnswerLog, CompletionOutput, RequestOutput
from graphengine.request import Request


@dataclass(slots=True)
class OutputStream:
    """One request's outputs. Looks at what has been committed, so that no step can be missed."""

    request: Request
    detokenizer: IncrementalDetokenizer | None
    log: AnswerLog
    num_tokens: int = 0  # of the answer, as far as outputs have been made

    @classmethod
    def open(cls, request: Request, tokenizer: Tokenizer | None) -> OutputStream:
        """Start the stream of a request that has just been queued; without a tokenizer no text."""
        request.metrics.arrival_time = time.perf_counter()
        log = AnswerLog(request.token_ids, request.num_prompt_tokens, request.token_origins)
        if tokenizer is None:
            return cls(request, None, log)
        skip = request.params.skip_special_tokens
        return cls(request, IncrementalDetokenizer(tokenizer, skip_special_tokens=skip), log)

    @property
    def is_behind(self) -> bool:
        """Whether tokens have been committed, or the end has come, and no output says so."""
        request = self.request
        if self.num_tokens < request.num_output_tokens:
            return True
        return request.is_finished and request.metrics.finished_time is None

    def next_output(self) -> RequestOutput:
        """An output of all that has been committed; costs what it adds to the one before.

        The last one, of a request that has finished, gives out the text that was held back.
        """
        request, log = self.request, self.log
        token_ids = request.token_ids[request.num_prompt_tokens + self.num_tokens :]
        self.num_tokens += len(token_ids)
        log.texts.append(self._decode(token_ids))
        now = time.perf_counter()
        if token_ids and request.metrics.first_token_time is None:
            request.metrics.first_token_time = now
        if request.is_finished:
            request.metrics.finished_time = now
        completion = CompletionOutput(
            index=0,
            finish_reason=request.finish_reason,
            log=log,
            num_tokens=self.num_tokens,
            num_texts=len(log.texts),
        )
        return RequestOutput(
            request_id=request.request_id,
            outputs=[completion],
            finished=request.is_finished,
            new_text=log.texts[-1],
            num_new_tokens=len(token_ids),
            metrics=replace(request.metrics),
        )

    def _decode(self, token_ids: Sequence[int]) -> str:
        if self.detokenizer is None:
            return ""
        text = self.detokenizer.add(token_ids)
        return text + self.detokenizer.flush() if self.request.is_finished else text
