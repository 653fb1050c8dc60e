"""Output streams: what is kept of a request for its outputs alone, and the outputs made of it.

Owns text, token origins and the clock readings that belong to delivery. Tokens come in as the step
emitted them; nothing here can change one.
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
    """One request's output as it grows."""

    request: Request
    detokenizer: IncrementalDetokenizer | None
    log: AnswerLog

    @classmethod
    def open(cls, request: Request, tokenizer: Tokenizer | None) -> OutputStream:
        """Start the stream of a request that has just been queued; without a tokenizer no text."""
        request.metrics.arrival_time = time.perf_counter()
        log = AnswerLog(request.token_ids, request.num_prompt_tokens)
        if tokenizer is None:
            return cls(request, None, log)
        skip = request.params.skip_special_tokens
        return cls(request, IncrementalDetokenizer(tokenizer, skip_special_tokens=skip), log)

    def add(self, token_ids: Sequence[int], *, num_draft_tokens: int, num_accepted: int) -> str:
        """Take over what a step emitted; returns the text that it completes."""
        if self.request.metrics.first_token_time is None:
            self.request.metrics.first_token_time = time.perf_counter()
        log = self.log
        log.token_origins.extend(["accepted"] * num_accepted)
        if len(token_ids) > num_accepted:
            log.token_origins.append("bonus" if num_accepted == num_draft_tokens else "recovered")
        text = self.detokenizer.add(token_ids) if self.detokenizer is not None else ""
        log.texts.append(text)
        return text

    def finish(self) -> str:
        """End the stream; returns the text that was held back."""
        self.request.metrics.finished_time = time.perf_counter()
        text = self.detokenizer.flush() if self.detokenizer is not None else ""
        self.log.texts.append(text)
        return text

    def output(self, new_text: str = "", num_new_tokens: int = 0) -> RequestOutput:
        """A snapshot; costs the same however much has been emitted."""
        request, log = self.request, self.log
        completion = CompletionOutput(
            index=0,
            finish_reason=request.finish_reason,
            log=log,
            num_tokens=request.num_output_tokens,
            num_texts=len(log.texts),
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt_token_ids,
            outputs=[completion],
            finished=request.is_finished,
            new_text=new_text,
            num_new_tokens=num_new_tokens,
            metrics=replace(request.metrics),
        )
