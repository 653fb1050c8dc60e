"""One answer: a request streamed to stdout, and its line of figures.

Owns the streaming loop that `generate` and `chat` share. Ctrl-C ends the answer between two steps.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from itertools import count

from graphengine.cli.console import Interrupt, deferred_interrupt
from graphengine.cli.drafts import DraftPainter
from graphengine.decode_timer import DecodeTimer
from graphengine.engine import Engine
from graphengine.outputs import RequestOutput
from graphengine.sampling.params import SamplingParams

_numbers = count()


class Answer:
    """Streams one answer.

    Args:
        engine: idle.
        colour_drafts: colour tokens by origin; needs a tokenizer.

    Attributes:
        interrupted: whether Ctrl-C ended the answer.
    """

    def __init__(self, engine: Engine, *, colour_drafts: bool = False) -> None:
        self.interrupted = False
        self._engine = engine
        self._painter = None
        if colour_drafts and engine.tokenizer is not None:
            self._painter = DraftPainter(engine.tokenizer)
        self._timer = DecodeTimer(1)

    def stream(self, prompt: Sequence[int] | str, params: SamplingParams) -> RequestOutput:
        """Write the answer to stdout as it comes; returns the last output.

        Raises:
            ValueError: the prompt or a parameter is refused; nothing was written.
        """
        request_id = f"answer-{next(_numbers)}"
        self._engine.add_request(request_id, prompt, params)
        with deferred_interrupt() as interrupt:
            for output in self._outputs(request_id, interrupt):
                self._write(output)
        if not output.outputs[0].text.endswith("\n"):
            sys.stdout.write("\n")
        sys.stdout.flush()
        return output

    def _outputs(self, request_id: str, interrupt: Interrupt) -> Iterator[RequestOutput]:
        finished = False
        while not finished:
            if interrupt.requested and not self.interrupted:
                self.interrupted = True
                self._engine.abort(request_id)
            outputs = self._engine.step()
            self._timer.add(outputs, time.perf_counter())
            for output in outputs:
                if output.request_id == request_id:
                    finished = output.finished
                    yield output

    def _write(self, output: RequestOutput) -> None:
        text = output.new_text
        if self._painter is not None:
            completion, new = output.outputs[0], output.num_new_tokens
            start = len(completion.token_ids) - new
            text = self._painter.add(completion.token_ids[start:], completion.token_origins[start:])
            text += self._painter.flush() if output.finished else ""
        sys.stdout.write(text)
        sys.stdout.flush()

    def figures(self, output: RequestOutput) -> str:
        """Tokens, speed and acceptance, one line."""
        metrics, completion = output.metrics, output.outputs[0]
        num_tokens = len(completion.token_ids)
        seconds, decoded = self._timer.window
        parts = [f"{num_tokens} tokens ({completion.finish_reason})"]
        parts.append(f"prompt {len(output.prompt_token_ids)}")
        if metrics.arrival_time is not None and metrics.first_token_time is not None:
            parts.append(f"first token {metrics.first_token_time - metrics.arrival_time:.2f} s")
        if seconds > 0:
            parts.append(f"{decoded / seconds:.1f} tokens/s")
        if metrics.num_draft_tokens:
            rate = metrics.num_accepted_tokens / metrics.num_draft_tokens
            parts.append(f"{rate:.0%} of {metrics.num_draft_tokens} drafts accepted")
            parts.append(f"{num_tokens / metrics.num_steps:.2f} tokens a step")
        return ", ".join(parts)
