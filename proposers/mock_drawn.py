"""A scripted proposer with a distribution: drafts by a function of the history, drawn as asked.

For tests of everything that a distribution brings: coupled and probabilistic drafts, and the
probabilities that come with them. The function is the test's; the drawing is `drafting.py`, as for
any proposer that has logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from proposers.base import (
    Draft,
    FloatArray,
    HostProposer,
    ProposeInputs,
    RequestSampling,
    Runtime,
    TokenArray,
)
from proposers.drafting import DraftSampler
from proposers.info import OptionInfo, ProposerInfo, ProposerSpec, Rule, none_or

Logits = Callable[[TokenArray], FloatArray]
"""History, drafts so far included, to logits `[vocab]`."""

_GREEDY = RequestSampling(temperature=0.0, seed=0)


class DrawnProposer(HostProposer):
    """Drafts as many tokens as it may, each by `logits` of what is before it.

    Args:
        runtime: of the engine.
        logits: None: those of `favour_next`.
    """

    name = "mock-drawn"
    produces_probs = True

    def __init__(self, runtime: Runtime, logits: Logits | None = None) -> None:
        self._runtime = runtime
        self._logits = logits or favour_next(runtime.vocab_size)
        self._sampler = DraftSampler(runtime)

    def propose(self, inputs: ProposeInputs) -> Draft:
        """Drafts of every request, with their distributions where they are drawn."""
        is_drawn = self._runtime.draft_sampling == "probabilistic"
        shape = (inputs.num_reqs, inputs.k, self._runtime.vocab_size)
        probs = np.zeros(shape, dtype=np.float32) if is_drawn else None
        rows = []
        for index, history in enumerate(inputs.token_ids):
            sampling = inputs.sampling[index] if inputs.sampling else _GREEDY
            place = None if probs is None else probs[index]
            count = int(inputs.num_draft_tokens[index])
            rows.append(self._draft_row(history, count, sampling, place))
        draft = Draft.from_rows(rows, inputs.k)
        return Draft(
            token_ids=draft.token_ids,
            num_draft_tokens=draft.num_draft_tokens,
            probs=None if probs is None else torch.from_numpy(probs),
        )

    def _draft_row(
        self,
        history: TokenArray,
        count: int,
        sampling: RequestSampling,
        probs: npt.NDArray[np.float32] | None,
    ) -> list[int]:
        """Drafts of one request; their distributions are written to `probs` [k, vocab]."""
        known = history
        for place in range(count):
            choice = self._sampler.choose(self._logits(known), sampling, len(known))
            known = np.append(known, np.int32(choice.token_id))
            if probs is not None:
                probs[place] = choice.probs
        return cast(list[int], known[len(history) :].tolist())


def favour_next(vocab_size: int) -> Logits:
    """Logits that fall with the distance from the last token to one behind it."""

    def logits(history: TokenArray) -> FloatArray:
        found: FloatArray = -((np.arange(vocab_size) - history[-1] - 1) % vocab_size / 4.0)
        return found

    return logits


_INFO = ProposerInfo(
    name=DrawnProposer.name,
    summary="drafts by a function from history to logits",
    kind="host",
    status="testing",
    produces_probs=True,
    options=(
        OptionInfo(
            name="logits",
            default=None,
            doc="function of the history to logits; default: next ids first",
            rule=none_or(Rule(callable, "a function of token ids to logits")),
        ),
    ),
)


def _build(options: Mapping[str, object], runtime: Runtime) -> DrawnProposer:
    return DrawnProposer(runtime, cast(Logits | None, options["logits"]))


SPEC = ProposerSpec(info=_INFO, factory=_build)
