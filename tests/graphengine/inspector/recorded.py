"""Runs of the tiny family under a recorder, and a text that a page must survive."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from graphengine.config import EngineConfig
from graphengine.engine import Engine
from graphengine.frame import Frame
from graphengine.inspector import Recorder
from graphengine.outputs import EngineStats, RequestOutput
from graphengine.request import Request
from graphengine.sampling.params import SamplingParams
from graphengine.speculative_config import SpeculativeConfig
from proposers.base import Draft

WEIGHTS = Path(__file__).parents[2] / "weights" / "tiny"
PROMPT = "def read(self, path):\n    with open(path) as file:\n        return file.read()\n\ndef "

# Ends of elements and comments, quotes, a character of four tokens, controls, line breaks that
# JavaScript knows, text from right to left and what turns text round.
HOSTILE = (
    "</script><!--<script>]]>&lt;\"'`\\ ${1} http://x.test/a//b\n\n\t🙂🇩🇪 é\x00\x1b[31m\x7f\r"
    "\u2028\u2029 مرحبا שלום \u202eabc\u202c\u200b\ufeff @@data@@ "
    "</style><img src=x onerror=fail()>"
)

# What drafts, with everything that a page says of it.
METHODS: dict[str, SpeculativeConfig | str] = {
    "off": "off",
    "ngram": SpeculativeConfig("ngram", max_draft_tokens=4),
    "suffix": SpeculativeConfig("suffix", max_draft_tokens=4, adaptive=False),
    "draft_model": SpeculativeConfig(
        "draft_model", model=WEIGHTS / "draft_model", max_draft_tokens=3, draft_sampling="coupled"
    ),
    "eagle": SpeculativeConfig(
        "eagle", model=WEIGHTS / "eagle3", max_draft_tokens=3, override="ngram", adaptive=False
    ),
    "rejection": SpeculativeConfig(
        "draft_model",
        model=WEIGHTS / "draft_model",
        max_draft_tokens=3,
        draft_sampling="probabilistic",
        verification="rejection",
        adaptive=False,
    ),
}


@dataclass(slots=True)
class Run:
    """What a run gave, once without and once with a recorder."""

    engine: Engine
    recorder: Recorder | None
    outputs: dict[str, RequestOutput] = field(default_factory=dict)
    # of every launched step: the drafts of each request, by id
    launched: list[dict[str, list[int]]] = field(default_factory=list)

    @property
    def streams(self) -> dict[str, list[list[int]]]:
        return {
            name: [one.token_ids for one in output.outputs] for name, output in self.outputs.items()
        }

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats()


def start(method: str, **config: Any) -> Engine:
    speculative = METHODS[method]
    settings: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 384} | config
    return Engine(WEIGHTS / "target", EngineConfig(speculative=speculative, **settings))


def serve(
    engine: Engine, requests: Sequence[tuple[str, str, SamplingParams]], *, record: bool
) -> Run:
    """Serve requests from a fresh start of an engine."""
    engine.start_afresh()
    recorder = Recorder(engine) if record else None
    run = Run(engine, recorder)
    verify = engine.runner.verify

    def spy(batch: Sequence[Request], draft: Draft) -> Frame:
        drafts = np.array(draft.token_ids)
        run.launched.append(
            {
                request.request_id: drafts[row, : draft.num_draft_tokens[row]].tolist()
                for row, request in enumerate(batch)
            }
        )
        return verify(batch, draft)

    engine.runner.verify = spy  # type: ignore[method-assign]
    try:
        with recorder if recorder is not None else nullcontext():
            for name, prompt, params in requests:
                engine.add_request(name, prompt, params)
            while engine.has_unfinished_requests():
                for output in engine.step():
                    run.outputs[output.request_id] = output
    finally:
        engine.runner.verify = verify  # type: ignore[method-assign]
    return run


def spelling(engine: Engine, text: str) -> SamplingParams:
    """Parameters under which the model can write nothing but this text."""
    assert engine.tokenizer is not None
    ids = engine.tokenizer.encode_plain(text)
    return SamplingParams(
        max_tokens=len(ids),
        ignore_eos=True,
        logprobs=3,
        allowed_tokens_fn=lambda prompt, output: [ids[min(len(output), len(ids) - 1)]],
    )
