"""Draft tokens out of a distribution: greedy, coupled and probabilistic."""

import numpy as np
import pytest

from proposers import DraftSampler, RequestSampling
from proposers.base import FloatArray
from tests.proposers.helpers import VOCAB_SIZE, TinyRuntime

LOGITS = np.random.default_rng(0).normal(size=VOCAB_SIZE) * 2
WARM = RequestSampling(temperature=0.7, seed=5, choice=2)


def softmax(logits: FloatArray, temperature: float) -> FloatArray:
    weights = np.exp((logits - logits.max()) / temperature)
    found: FloatArray = weights / weights.sum()
    return found


@pytest.mark.parametrize("kind", ["greedy", "coupled", "probabilistic"])
def test_at_temperature_zero_every_kind_is_greedy(kind: str) -> None:
    """A greedy request whose drafts are sampled; ties go to the lowest id."""
    sampler = DraftSampler(TinyRuntime(draft_sampling=kind))  # type: ignore[arg-type]
    tied = np.zeros(VOCAB_SIZE)
    tied[[7, 9]] = 1.0
    choice = sampler.choose(tied, RequestSampling(temperature=0.0, seed=1), 3)
    assert choice.token_id == 7
    assert (choice.probs is None) == (kind != "probabilistic")
    if choice.probs is not None:
        assert choice.probs[7] == 1
        assert choice.probs.sum() == 1


def test_coupled_takes_the_noise_of_the_target() -> None:
    """Drafts that agree with the target no more often than unrelated ones."""
    runtime = TinyRuntime(draft_sampling="coupled")
    for position in range(50):
        expected = np.argmax(
            np.log(softmax(LOGITS, 0.7)) + runtime.gumbels(WARM, position, "target")
        )
        assert DraftSampler(runtime).choose(LOGITS, WARM, position).token_id == expected


def test_probabilistic_hands_over_what_it_drew_from() -> None:
    """q of other numbers than those that drew the draft (case 4), or the target's noise."""
    runtime = TinyRuntime(draft_sampling="probabilistic")
    sampler = DraftSampler(runtime)
    counts = np.zeros(VOCAB_SIZE)
    for position in range(4000):
        choice = sampler.choose(LOGITS, WARM, position)
        assert choice.probs is not None
        assert choice.probs.dtype == np.float32
        noise = runtime.gumbels(WARM, position, "draft")
        with np.errstate(divide="ignore"):
            assert choice.token_id == np.argmax(np.log(choice.probs.astype(np.float64)) + noise)
        counts[choice.token_id] += 1
    expected = 4000 * softmax(LOGITS, 0.7)
    assert np.allclose(choice.probs, softmax(LOGITS, 0.7), atol=1e-6)
    common = expected > 5
    assert (((counts - expected) ** 2 / expected)[common]).sum() < 2 * common.sum()


@pytest.mark.parametrize("kind", ["coupled", "probabilistic"])
def test_what_has_no_weight_is_never_drafted(kind: str) -> None:
    """-inf, +inf and temperatures at both ends that make a NaN of them."""
    logits = np.full(VOCAB_SIZE, -np.inf)
    logits[[3, 4]] = -1e30, 5.0
    for temperature in (2.0**-126, 1.0, 2.0**127):
        request = RequestSampling(temperature=temperature, seed=1)
        for infinite in (False, True):
            logits[4] = np.inf if infinite else 5.0
            sampler = DraftSampler(TinyRuntime(draft_sampling=kind))  # type: ignore[arg-type]
            for position in range(20):
                choice = sampler.choose(logits, request, position)
                assert choice.token_id == 4 or (choice.token_id == 3 and temperature > 1e30)
                assert choice.probs is None or choice.probs[choice.token_id] > 0
