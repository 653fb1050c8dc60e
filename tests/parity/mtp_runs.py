"""What the tests of mtp share: drafts recorded with the history that they were made from.

Random layers are never right, so a run may be told to hand the verifier drafts that are: so many of
each step, by a script. What was really drafted is what is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from graphengine.sampling.params import SamplingParams
from graphengine.scheduler import StepPlan
from proposers.base import Draft
from proposers.mtp import MtpProposer
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Setup
from tests.mtp_checkpoints import SINGLE_FILE, MtpCheckpoint, add_layers
from tests.tiny import make_checkpoint

Tokens = tuple[int, ...]
MakeMtp = Callable[..., MtpCheckpoint]
MAX_TOKENS = 18
PROMPT = tuple(range(3, 16))


@dataclass(frozen=True, slots=True)
class Drafted:
    """The drafts of one request in one step."""

    history: Tokens
    drafts: Tokens
    # [vocab] of each draft, from the graph kind `eager`; of batches of one alone
    logits: list[Tensor]


@dataclass
class Recorder:
    """A harness whose drafts are recorded.

    Args:
        harness: of an engine that drafts by mtp.
        truth: prompt -> prompt and answer; with it, drafts are replaced by right ones.
        accept: how many of a step's drafts are to be right, step by step, over and over.
        hand_over: whether the verifier gets any drafts; if not, there is a step for every token.
    """

    harness: Harness
    truth: dict[Tokens, Tokens] = field(default_factory=dict)
    accept: Sequence[int] = (0,)
    hand_over: bool = True
    drafted: list[Drafted] = field(default_factory=list)

    def __post_init__(self) -> None:
        proposer, drafting = self.harness.engine.proposer, self.harness.engine.drafting
        assert isinstance(proposer, MtpProposer)
        self.proposer = proposer
        self._logits: list[Tensor] = []
        self._right = cycle(self.accept)
        self._choose, self._propose = proposer.ops.choose, drafting.propose
        if self.harness.engine.runner.manager.kind == "eager":
            proposer.ops.choose = self._spy_choose  # type: ignore[method-assign]
        drafting.propose = self._spy_propose  # type: ignore[method-assign]

    def serve(self, prompts: Sequence[Tokens], name: str = "r", **params: Any) -> list[Tokens]:
        """Prompt and answer of each prompt, all at once."""
        params = {"max_tokens": MAX_TOKENS, "ignore_eos": True, **params}
        for index, prompt in enumerate(prompts):
            self.harness.add(f"{name}{index}", prompt, SamplingParams(**params))
        self.harness.drain()
        streams = [self.harness.stream(f"{name}{index}") for index in range(len(prompts))]
        return [(*prompt, *stream) for prompt, stream in zip(prompts, streams, strict=True)]

    def _spy_choose(self, *args: Any) -> None:
        self._logits.append(args[3][0].clone())
        self._choose(*args)

    def _spy_propose(self, plan: StepPlan) -> Draft:
        self._logits.clear()
        draft = self._propose(plan)
        replaced = draft.token_ids.copy()
        num_right = next(self._right) if draft.num_draft_tokens.any() else 0
        for row, decode in enumerate(plan.decodes):
            count = int(draft.num_draft_tokens[row])
            history = tuple(decode.request.token_ids)
            if count:
                drafts = tuple(draft.token_ids[row, :count].tolist())
                self.drafted.append(Drafted(history, drafts, self._logits[:count]))
            stream = self.truth.get(tuple(decode.request.prompt_token_ids), ())
            right = stream[len(history) :][: min(count, num_right)]
            replaced[row, : len(right)] = right
        if not self.hand_over:
            return replace(
                Draft.empty(len(plan.decodes), plan.k), draft_kv_lens=draft.draft_kv_lens
            )
        return replace(draft, token_ids=replaced)


def record(
    checkpoint: MtpCheckpoint, setup: Setup, *, options: dict[str, Any] | None = None, **kwargs: Any
) -> Recorder:
    """A recorder of a new engine."""
    lazy = replace(setup, lazy=True)  # most cells of a table are of no use here
    engine = lazy.start(checkpoint.target, **checkpoint.options, **(options or {}))
    return Recorder(Harness(engine), **kwargs)


@dataclass(frozen=True, slots=True)
class Plain:
    """What plain runs of prompts say: whole streams, and the drafts behind every history."""

    streams: dict[Tokens, Tokens]
    drafts: dict[Tokens, Tokens]

    def check(self, recorder: Recorder, least: int) -> None:
        """Every recorded draft, of which there are so many, is the plain one."""
        assert len(recorder.drafted) >= least
        for one in recorder.drafted:
            assert one.drafts == self.drafts[one.history][: len(one.drafts)], len(one.history)


def plain(checkpoint: MtpCheckpoint, prompts: Sequence[Tokens], setup: Setup) -> Plain:
    """One by one, whole prompts, no cache, nothing accepted: a draft behind every history."""
    recorder = record(checkpoint, replace(setup, prefix=False), hand_over=False)
    streams = {}
    for index, prompt in enumerate(prompts):
        [streams[prompt]] = recorder.serve([prompt], name=f"{index}-")
    recorder.harness.engine.close()
    return Plain(streams, {one.history: one.drafts for one in recorder.drafted})


def cached_maker(root: Path, make: MakeMtp) -> MakeMtp:
    """As `make`, each checkpoint made once."""
    made: dict[str, MtpCheckpoint] = {}

    def get(family: str = "deepseek", **kwargs: Any) -> MtpCheckpoint:
        key = f"{family}-{'-'.join(f'{k}-{v}' for k, v in kwargs.items())}".replace(".", "_")
        if key not in made:
            made[key] = make(root / key, family, **kwargs)
        return made[key]

    return get


def make_perfect(root: Path, num_layers: int, family: str = "deepseek") -> MtpCheckpoint:
    """A target without attention, whose next token is a function of the last one, and layers that
    compute that function from the embedding alone.
    """
    target = make_checkpoint(root / "target", num_hidden_layers=1, rms_norm_eps=1e-12)
    weights = load_file(target / SINGLE_FILE)
    weights["model.layers.0.self_attn.o_proj.weight"].zero_()
    embedding = weights["model.embed_tokens.weight"]  # which the layers norm
    embedding /= embedding.pow(2).mean(-1, keepdim=True).sqrt()
    save_file(weights, target / SINGLE_FILE, metadata={"format": "pt"})
    size = embedding.shape[1]
    layer = {
        "embed_norm": torch.ones(size),
        "hidden_norm": torch.ones(size),
        "projection": torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1),
        "final": weights["model.norm.weight"],
    }
    prefix = "model.layers.0."
    layer |= {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}
    return add_layers(target, family, [layer] * num_layers)
