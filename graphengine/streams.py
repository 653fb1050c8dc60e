"""Output streams: what is kept of a request for its outputs alone, and the outputs made of it.

Owns text and the clock readings that belong to delivery. Tokens and their origins are the
request's; nothing here can change one. Making an output changes nothing: the assignment of its
progress does, so that an output that breaks off half-way is made again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from graphengine.models.detokenizer import IncrementalDetokenizer
from graphengine.models.stop_strings import end_at_stop, num_held
from graphengine.models.tokenizer import Tokenizer
from graphengine.outputs import AnswerLog, CompletionOutput, RequestOutput
from graphengine.request import Request, RequestMetrics


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a stream's outputs have come."""

    detokenizer: IncrementalDetokenizer | None
    completion: CompletionOutput  # what the latest output says of this answer
    held: str = ""  # decoded text that may be the beginning of a stop string

    @property
    def num_tokens(self) -> int:
        return self.completion.num_tokens

    @property
    def ended(self) -> bool:
        return self.completion.finish_reason is not None


@dataclass(frozen=True, slots=True)
class _Read:
    """Tokens decoded beyond a stream's progress."""

    detokenizer: IncrementalDetokenizer | None
    text: str  # to give out
    held: str
    num_to_stop: int | None  # tokens up to the end of a stop string, where there is one


@dataclass(slots=True)
class OutputStream:
    """The outputs of one answer. Looks at what has been committed, so that no step is missed."""

    request: Request
    log: AnswerLog
    progress: Progress
    answers: list[OutputStream]  # all streams of the same prompt, itself among them

    @classmethod
    def open_all(
        cls, requests: Sequence[Request], tokenizer: Tokenizer | None
    ) -> list[OutputStream]:
        """Start the streams of the answers to a prompt; without a tokenizer there is no text."""
        answers: list[OutputStream] = []
        answers.extend(cls._open(request, tokenizer, answers) for request in requests)
        return answers

    @classmethod
    def _open(
        cls, request: Request, tokenizer: Tokenizer | None, answers: list[OutputStream]
    ) -> OutputStream:
        request.metrics.arrival_time = time.perf_counter()
        log = AnswerLog(
            request.token_ids,
            request.num_prompt_tokens,
            request.token_origins,
            request.token_logprobs,
            request.prompt_logprobs,
        )
        detokenizer = None
        if tokenizer is not None:
            skip = request.params.skip_special_tokens
            detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
        nothing = CompletionOutput(
            index=request.choice, finish_reason=None, log=log, num_tokens=0, num_texts=0
        )
        return cls(request, log, Progress(detokenizer, nothing), answers)

    @property
    def is_behind(self) -> bool:
        """Whether tokens have been committed, or the end has come, and no output says so."""
        request, progress = self.request, self.progress
        if progress.num_tokens < request.num_output_tokens:
            return True
        return request.is_finished and not progress.ended

    def next_output(self) -> tuple[RequestOutput, Progress]:
        """An output of all that has been committed, and the progress that it makes.

        It costs what it adds to the one before, and of other answers a look. The last one, of a
        request that has finished, gives out the text that was held back.
        """
        request, log, done = self.request, self.log, self.progress
        token_ids = request.token_ids[request.num_prompt_tokens + done.num_tokens :]
        read = self._read(token_ids)
        text = read.text
        if request.is_finished and read.num_to_stop is None and read.detokenizer is not None:
            rest = read.held + read.detokenizer.flush()
            text += rest[: self._end_at_stop(rest, len(read.held))]
        log.texts[done.completion.num_texts :] = [text]
        completion = replace(
            done.completion,
            finish_reason=request.finish_reason,
            num_tokens=done.num_tokens + len(token_ids),
            num_texts=done.completion.num_texts + 1,
        )
        now = time.perf_counter()
        if token_ids and request.metrics.first_token_time is None:
            request.metrics.first_token_time = now
        if request.is_finished:
            request.metrics.finished_time = now
        outputs = [one.progress.completion for one in self.answers]
        outputs[request.choice] = completion
        finished = request.is_finished and all(one.finish_reason is not None for one in outputs)
        told = self.answers if finished else [self]
        output = RequestOutput(
            request_id=request.asked_id,
            outputs=outputs,
            finished=finished,
            index=request.choice,
            new_text=text,
            num_new_tokens=len(token_ids),
            metrics=RequestMetrics.together([one.request.metrics for one in told]),
        )
        return output, Progress(read.detokenizer, completion, read.held)

    def num_to_stop(self, token_ids: Sequence[int]) -> int | None:
        """How many of the next tokens complete a stop string; None where they do not."""
        request = self.request
        if not request.params.stop:
            return None
        read = self._read(token_ids)
        count = request.num_prompt_tokens + self.progress.num_tokens + len(token_ids)
        if read.num_to_stop is None and read.detokenizer is not None and count == request.limit:
            # The last of them: what is still held back comes out, and may complete one.
            rest = read.held + read.detokenizer.flush()
            return None if self._end_at_stop(rest, len(read.held)) is None else len(token_ids)
        return read.num_to_stop

    def _read(self, token_ids: Sequence[int]) -> _Read:
        """Decode what comes next, token by token, up to the end of a stop string."""
        params, done = self.request.params, self.progress
        if done.detokenizer is None:
            return _Read(None, "", "", None)
        detokenizer, given, text = done.detokenizer.copy(), "", done.held
        for count, token_id in enumerate(token_ids, start=1):
            before = len(text)
            text += detokenizer.add([token_id])
            if done.num_tokens + count >= params.min_tokens:
                end = self._end_at_stop(text, before)
                if end is not None:
                    return _Read(detokenizer, given + text[:end], "", count)
            keep = len(text) - num_held(text, params.stop_texts)
            given, text = given + text[:keep], text[keep:]
        return _Read(detokenizer, given, text, None)

    def _end_at_stop(self, text: str, beyond: int) -> int | None:
        params = self.request.params
        include = params.include_stop_str_in_output
        return end_at_stop(text, params.stop_texts, include=include, beyond=beyond)

    def has_counted(self, output: RequestOutput) -> bool:
        """False for an output of this stream that its progress does not include."""
        completion = output.outputs[output.index]
        counted = self.progress.completion.num_texts
        return completion.log is not self.log or completion.num_texts <= counted
