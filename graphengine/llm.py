"""LLM: the front door. A list of prompts in, a list of answers out; a thin wrapper over Engine."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from threading import RLock
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from capture.config import CaptureConfig
from graphengine.config import AttentionKind, CacheConfig, EngineConfig, Numerics
from graphengine.engine import Engine
from graphengine.models.tokenizer import Tokenizer
from graphengine.outputs import EngineStats, RequestOutput
from graphengine.sampling.params import SamplingParams
from graphengine.speculative_config import SpeculativeConfig
from graphengine.startup import StartProgress

Prompts = str | Sequence[str] | Sequence[Sequence[int]]


class LLM:
    """A loaded model, ready to generate. A context manager; closing frees graphs and memory.

    Args:
        model: a Hugging Face directory (config.json, safetensors, tokenizer files), a .gguf file,
            or `smollm2-135m`.
        dtype: of weights and KV cache: `auto` (the checkpoint's; bfloat16 for GGUF and for
            float16), `bfloat16` or `float32`. Sums and logits are float32 on CPU; rows that meet
            a bfloat16 matrix are rounded to it where the CPU multiplies such pairs (AVX512_BF16).
        device: `auto` (CUDA where there is a device), `cpu` or `cuda`.
        max_model_len: context limit in tokens, prompt and output together; None: the checkpoint's,
            at most 8192.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: rows a step, prefill tokens and k + 1 a decode together; None: 2048
            or more.
        seed: of the series from which requests that bring no seed get theirs, in the order in which
            they are added; 0 to 2**63 - 1.
        numerics: `invariant`: a row's logits depend on nothing that shares its step, checked at
            start. `fast`: not checked.
        async_steps: 1: a step is launched before the tokens of the one before have been read, so
            that the host's work hides behind the device's. Same tokens; a request's last step may
            run for nothing. Refused with proposers that need the tokens on the host. 0: every step
            waits for its own.
        attention: the target's: `auto`, `native` (the CPU's), `triton` or `flashinfer` (a GPU's).
            `auto` on a GPU measures the two at the first start, unless only one can serve, and
            remembers; `capture_report()` says which one it is and why.
        speculative: how to draft; None: what `GRAPHENGINE_SPECULATE` says, else off. `"off"`,
            `"ngram"` and `"ngram:6"` are accepted too.
        logits_processors: capture two more graphs a cell, so that requests may bring logits
            processors of their own.
        capture: how steps are captured; None: the defaults.
        cache: KV cache; None: the defaults.
        progress: called with (phase, done, total, what) while the model loads.

    Raises:
        ValueError: the model or an argument is refused, before any weight is read where that is
            possible.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int | None = None,
        seed: int = 0,
        numerics: Numerics = "invariant",
        async_steps: int = 0,
        attention: AttentionKind = "auto",
        speculative: SpeculativeConfig | str | None = None,
        logits_processors: bool = False,
        capture: CaptureConfig | None = None,
        cache: CacheConfig | None = None,
        progress: StartProgress | None = None,
    ) -> None:
        config = EngineConfig(
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            seed=seed,
            numerics=numerics,
            async_steps=async_steps,
            attention=attention,
            speculative=speculative,
            logits_processors=logits_processors,
            capture=capture if capture is not None else CaptureConfig(),
            cache=cache if cache is not None else CacheConfig(),
        )
        self.engine = Engine(model, config, progress=progress)
        self._turn = RLock()  # calls of several threads, one at a time: the engine has one caller

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Generate for every prompt; outputs come in the order of the prompts.

        Requests that were added to `engine` go on beside them; what they emit meanwhile is
        delivered by the next `engine.step()`. Calls of several threads run one after the other.

        Args:
            prompts: one text, a list of texts, or a list of token id lists.
            params: one for all prompts, or one each; None: the defaults.
            cache_salt: see `Engine.add_request`.

        Raises:
            ValueError: a prompt or parameter is refused. After this or any other error, Ctrl-C
                included, nothing of this call is left queued.
            RuntimeError: the LLM is closed.
        """
        batch = _as_batch(prompts)
        each = _as_params(params, len(batch))
        with self._turn:
            return self._generate(batch, each, cache_salt)

    def _generate(
        self,
        batch: Sequence[str | Sequence[int]],
        params: Sequence[SamplingParams],
        cache_salt: str | None,
    ) -> list[RequestOutput]:
        done: dict[str, RequestOutput | None] = {}  # by request of this call, in order
        others: list[RequestOutput] = []
        try:
            for index, (prompt, one) in enumerate(zip(batch, params, strict=True)):
                request_id = f"prompt-{index}-{uuid4().hex}"  # no other has it
                done[request_id] = None
                self.engine.add_request(request_id, prompt, one, cache_salt=cache_salt)
            num_running = len(done)
            while num_running:
                for output in self.engine.step():
                    if output.request_id not in done:
                        others.append(output)
                    elif output.finished:
                        done[output.request_id] = output
                        num_running -= 1
        finally:  # after an error or Ctrl-C nothing of this call may run on in the next
            self.engine.hand_back(others)  # first: discard also tells the proposer, which may fail
            self.engine.discard(done)
        return [output for output in done.values() if output is not None]

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Text to token ids and back (`encode_plain`, `decode`); None where there is none."""
        return self.engine.tokenizer

    def default_params(self, **changes: Any) -> SamplingParams:
        """What the checkpoint recommends for sampling, and nothing uses unless it is asked for.

        From generation_config.json (greedy where `do_sample` is not true) or a GGUF file's
        `general.sampling` keys; a checkpoint that has none gives `SamplingParams(**changes)`.

        Args:
            changes: fields of `SamplingParams`; they win.

        Raises:
            ValueError: the file or a change has a value that is not allowed.
        """
        return self.engine.sampling_defaults.params(**changes)

    def chat(
        self, messages: Sequence[Mapping[str, str]], params: SamplingParams | None = None
    ) -> RequestOutput:
        """Generate the next turn; `messages` are `{"role", "content"}`, oldest first.

        Raises:
            ValueError: as `chat_prompt` and `generate`.
            RuntimeError: the LLM is closed.
        """
        return self.generate([self.chat_prompt(messages)], params)[0]

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation under the model's chat template.

        Raises:
            ValueError: the checkpoint has no tokenizer or no chat template.
        """
        if self.engine.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer, hence no chat template")
        return self.engine.tokenizer.apply_chat_template(messages)

    def stats(self) -> EngineStats:
        """Counters since the engine started. Raises RuntimeError where the LLM is closed."""
        return self.engine.stats()

    def capture_report(self) -> str:
        """The shape table as captured, printable. Raises RuntimeError where the LLM is closed."""
        return self.engine.capture_report()

    def close(self) -> None:
        """Free graphs, buffers, weights and KV, once a `generate` of another thread has ended.

        Closing twice is fine.
        """
        with self._turn:
            self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _as_batch(prompts: Prompts) -> list[str | Sequence[int]]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Iterable):
        raise ValueError(
            f"prompts is of type {type(prompts).__name__}; give a text, a list of texts or a list "
            "of token id lists"
        )
    batch: list[str | Sequence[int]] = list(prompts)
    if batch and all(isinstance(item, numbers.Integral) for item in batch):
        raise ValueError(
            "prompts is a list of integers; a single prompt of token ids goes into a list of "
            "its own"
        )
    return batch


def _as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * num_prompts
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Sequence):
        raise ValueError(f"params={params!r}: expected SamplingParams, or a list of one each")
    if len(params) != num_prompts:
        raise ValueError(
            f"{len(params)} SamplingParams for {num_prompts} prompts: give one, or one each"
        )
    return list(params)
