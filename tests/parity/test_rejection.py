"""verification="rejection" through the engine: what comes out is distributed as without drafts.

Many requests of one prompt, each with a seed of its own, through the real scheduler, sampler and
verifier; their tokens after a few fixed prefixes against the probabilities that the model itself
gives there. What the mode leaves alone, greedy requests, stays identical.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from graphengine.bench.distributions import chi_square_p, holm
from graphengine.config import EngineConfig
from graphengine.engine import Engine
from graphengine.sampling import noise
from graphengine.sampling.params import SamplingParams
from graphengine.speculative_config import SpeculativeConfig
from proposers.base import Draft, HostProposer, ProposeInputs
from proposers.mock import JunkProposer
from tests.tiny import VOCAB_SIZE, make_checkpoint

pytestmark = pytest.mark.parity

PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]
ALLOWED = (5, 6, 7, 8, 9, 10)  # a small vocabulary: the model's own, cut
NUM_REQUESTS, NUM_TOKENS = 4000, 3
PARAMS = SamplingParams(
    max_tokens=NUM_TOKENS, temperature=0.8, allowed_token_ids=ALLOWED, ignore_eos=True
)


class DrawnProposer(HostProposer):
    """Drafts drawn from one distribution by the draft's own noise, which come with it."""

    name = "mock-drawn"
    produces_probs = True

    def __init__(self, q: Sequence[float], stream: int = noise.DRAFT) -> None:
        self.q = np.zeros(VOCAB_SIZE, dtype=np.float32)
        self.q[list(ALLOWED)] = q
        self.stream = stream
        self.num_drafts = 0

    def propose(self, inputs: ProposeInputs) -> Draft:
        rows = []
        with np.errstate(divide="ignore"):
            logs = np.log(self.q[: ALLOWED[-1] + 1])
        for request_id, history, count in zip(
            inputs.request_ids, inputs.token_ids, inputs.num_draft_tokens.tolist(), strict=True
        ):
            seed = int(request_id.removeprefix("r"))
            rows.append(
                [
                    int(
                        np.argmax(
                            logs
                            + noise.gumbels(
                                seed, position=position, stream=self.stream, count=len(logs)
                            )
                        )
                    )
                    for position in range(len(history), len(history) + count)
                ]
            )
            self.num_drafts += count
        draft = Draft.from_rows(rows, inputs.k)
        probs = torch.from_numpy(np.tile(self.q, (inputs.num_reqs, inputs.k, 1)))
        return Draft(
            token_ids=draft.token_ids, num_draft_tokens=draft.num_draft_tokens, probs=probs
        )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("rejection") / "model")


def start(checkpoint: Path, proposer: Any, verification: str = "rejection") -> Engine:
    config = EngineConfig(
        dtype="float32",
        max_model_len=64,
        speculative=SpeculativeConfig(
            "ngram", max_draft_tokens=2, verification=verification, adaptive=False
        ),
    )
    return Engine(checkpoint, config, proposer=proposer)


def streams(engine: Engine, params: SamplingParams = PARAMS) -> npt.NDArray[np.int64]:
    """Tokens [NUM_REQUESTS, NUM_TOKENS] of requests whose seed is their number."""
    found: dict[str, list[int]] = {}
    for index in range(NUM_REQUESTS):
        seeded = SamplingParams(
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            allowed_token_ids=params.allowed_token_ids,
            ignore_eos=True,
            seed=index,
        )
        engine.add_request(f"r{index}", PROMPT, seeded)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[output.request_id] = output.outputs[0].token_ids
    return np.array([found[f"r{index}"] for index in range(NUM_REQUESTS)])


@pytest.fixture(scope="module")
def target(checkpoint: Path) -> dict[tuple[int, ...], npt.NDArray[np.float64]]:
    """The model's probabilities of ALLOWED after the prompt and each beginning of up to two."""
    engine = start(checkpoint, None)
    key = engine.runner.manager.dispatch(1, 0, "greedy")
    found = {}
    beginnings = [(), *((a,) for a in ALLOWED), *((a, b) for a in ALLOWED for b in ALLOWED)]
    for beginning in beginnings:
        engine.add_request("a", [*PROMPT, *beginning], SamplingParams(max_tokens=1))
        while engine.has_unfinished_requests():
            engine.step()
        logits = engine.runner.last_logits(key)[0, 0, list(ALLOWED)].double()
        found[beginning] = torch.softmax(logits / PARAMS.temperature, 0).numpy()
    engine.close()
    return found


def p_values(got: npt.NDArray[np.int64], target: dict[tuple[int, ...], Any]) -> list[float]:
    """One test for each place: after the prompt, and after each common beginning."""
    ids = list(ALLOWED)
    values = []
    for beginning, probs in target.items():
        depth = len(beginning)
        rows = got[(got[:, :depth] == np.array(beginning, dtype=np.int64)).all(axis=1)]
        if len(rows) >= 200:
            counts = np.array([(rows[:, depth] == token).sum() for token in ids])
            assert counts.sum() == len(rows), "a token that is not allowed"
            values.append(chi_square_p(counts, probs))
    assert len(values) >= 5, "too few places to say anything"
    return values


PROPOSERS = {
    "ngram": lambda: None,
    "junk": lambda: JunkProposer(vocab_size=VOCAB_SIZE),
    "flat q": lambda: DrawnProposer([1 / 6] * 6),
    "one-sided q": lambda: DrawnProposer([0.9, 0.1, 0, 0, 0, 0]),
}


@pytest.mark.parametrize("name", PROPOSERS)
def test_tokens_are_distributed_as_without_drafts(
    name: str, checkpoint: Path, target: dict[tuple[int, ...], Any]
) -> None:
    """A residual, a bonus or an acceptance that favours a token (Holm over all places)."""
    engine = start(checkpoint, PROPOSERS[name]())
    got = streams(engine)
    stats = engine.stats()
    assert stats.num_draft_tokens > 0
    engine.close()
    assert min(holm(p_values(got, target))) > 1e-3


def test_draft_noise_used_for_the_residual_is_caught(
    checkpoint: Path, target: dict[tuple[int, ...], Any]
) -> None:
    """The test above must see it."""
    q = [0.2, 0.2, 0.2, 0.2, 0.01, 0.19]
    found = []
    for stream in (noise.DRAFT, noise.RESIDUAL):
        engine = start(checkpoint, DrawnProposer(q, stream))
        found.append(min(holm(p_values(streams(engine), target))))
        engine.close()
    assert found[0] > 1e-3 > found[1]


def test_greedy_requests_are_identical(checkpoint: Path) -> None:
    """Rejection applied to a row at temperature 0."""
    expected = []
    for verification in ("exact", "rejection"):
        engine = start(checkpoint, None, verification)
        engine.add_request("a", PROMPT, SamplingParams(max_tokens=30, ignore_eos=True))
        engine.add_request("b", PROMPT, SamplingParams(max_tokens=30, presence_penalty=0.5))
        ids = {}
        while engine.has_unfinished_requests():
            ids.update({o.request_id: o.outputs[0].token_ids for o in engine.step()})
        expected.append(ids)
        engine.close()
    assert expected[0] == expected[1]
