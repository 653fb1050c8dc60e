"""Configuration faults, each refused before any weight is read, naming the field (case 41)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from capture.config import CaptureConfig
from graphengine.config import CacheConfig
from graphengine.llm import LLM
from graphengine.speculative_config import SpeculativeConfig
from tests.graphengine.engine.checkpoints import Checkpoints

FAULTS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "k-zero": (
        lambda: {"speculative": SpeculativeConfig("ngram", max_draft_tokens=0)},
        "max_draft_tokens=0.*1 to 64",
    ),
    "k-negative": (
        lambda: {"speculative": SpeculativeConfig("ngram", max_draft_tokens=-3)},
        "max_draft_tokens=-3",
    ),
    "k-fraction": (
        lambda: {"speculative": SpeculativeConfig("ngram", max_draft_tokens=1.9)},  # type: ignore[arg-type]
        r"max_draft_tokens=1\.9",
    ),
    "k-huge": (
        lambda: {"speculative": SpeculativeConfig("ngram", max_draft_tokens=65)},
        "max_draft_tokens=65",
    ),
    "k-zero-text": (lambda: {"speculative": "ngram:0"}, "max_draft_tokens=0"),
    "k-no-number": (lambda: {"speculative": "ngram:six"}, "speculative='ngram:six'"),
    "k-odd-digit": (lambda: {"speculative": "ngram:²"}, "speculative='ngram:²'"),
    "k-missing": (lambda: {"speculative": "ngram:"}, "speculative='ngram:'"),
    "model-for-host": (
        lambda: {"speculative": SpeculativeConfig("ngram", model="/nowhere")},
        "model='/nowhere'.*carries no model",
    ),
    "self-check-for-host": (
        lambda: {"speculative": SpeculativeConfig("ngram", self_check="off")},
        "self_check='off'.*carries no model",
    ),
    "self-check-unknown": (
        lambda: {"speculative": SpeculativeConfig("ngram", self_check="maybe")},
        "self_check='maybe'.*error, warn, off",
    ),
    "verification-unknown": (
        lambda: {"speculative": SpeculativeConfig("ngram", verification="typical")},
        "verification='typical': allowed are exact, rejection",
    ),
    "probabilistic-in-exact-mode": (
        lambda: {"speculative": SpeculativeConfig("mock-drawn", draft_sampling="probabilistic")},
        "'probabilistic' with verification='exact' would accept too seldom",
    ),
    "coupled-in-rejection-mode": (
        lambda: {
            "speculative": SpeculativeConfig(
                "mock-drawn", verification="rejection", draft_sampling="coupled"
            )
        },
        "'coupled' with verification='rejection'.*use verification='exact'",
    ),
    "draft-sampling-coupled-without-probs": (
        lambda: {"speculative": SpeculativeConfig("ngram", draft_sampling="coupled")},
        "draft_sampling='coupled'.*'ngram', which has no distribution: greedy",
    ),
    "draft-sampling-without-probs": (
        lambda: {
            "speculative": SpeculativeConfig(
                "ngram", verification="rejection", draft_sampling="probabilistic"
            )
        },
        "draft_sampling='probabilistic': .*'ngram', which has no distribution: greedy",
    ),
    "adaptive-unknown": (
        lambda: {"speculative": SpeculativeConfig("ngram", adaptive="sometimes")},
        "adaptive='sometimes': expected True, False, 'threshold', or a mapping",
    ),
    "adaptive-without-one-request": (
        lambda: {"speculative": SpeculativeConfig("ngram", adaptive={2: 6})},
        r"adaptive=\{2: 6\}: expected .* of requests, 1 among them",
    ),
    "adaptive-above-the-maximum": (
        lambda: {"speculative": SpeculativeConfig("ngram", max_draft_tokens=3, adaptive={1: 4})},
        "adaptive=.*to 0 to 3 drafts",
    ),
    "adaptive-of-no-integers": (
        lambda: {"speculative": SpeculativeConfig("ngram", adaptive=[(1, True)])},
        "adaptive=",
    ),
    "option-unknown": (
        lambda: {"speculative": SpeculativeConfig("ngram", max_ngram=4)},
        "max_ngram",
    ),
    "option-out-of-range": (
        lambda: {"speculative": SpeculativeConfig("ngram", max_ngram_size=65)},
        "max_ngram_size=65: .*from 1 to 64",
    ),
    "options-at-odds": (
        lambda: {"speculative": SpeculativeConfig("ngram", min_ngram_size=4, max_ngram_size=3)},
        "min_ngram_size=4: .*from 1 to 3",
    ),
    "option-of-a-mock": (
        lambda: {"speculative": SpeculativeConfig("mock-ragged", true_fraction=2)},
        "true_fraction=2: .*from 0 to 1",
    ),
    "method-unknown": (lambda: {"speculative": SpeculativeConfig("ngrams")}, "ngrams.*ngram"),
    "method-unsupported": (lambda: {"speculative": "medusa"}, "medusa.*unsupported"),
    "k-above-budget": (
        lambda: {
            "speculative": "ngram:6",
            "max_num_seqs": 2,
            "max_num_batched_tokens": 4,
        },
        "max_num_batched_tokens=4: .* >= 7.*max_num_seqs=2.*max_draft_tokens=6",
    ),
    "seqs-above-budget": (
        lambda: {"max_num_seqs": 8, "max_num_batched_tokens": 4},
        "max_num_batched_tokens=4: .* >= 8",
    ),
    "ladder-above-k": (
        lambda: {"speculative": "ngram:2", "capture": CaptureConfig(draft_lengths=(4,))},
        "draft_lengths.*4",
    ),
    "reqs-above-seqs": (
        lambda: {"max_num_seqs": 2, "capture": CaptureConfig(num_reqs=(4,))},
        "num_reqs.*4",
    ),
    "context-too-long": (lambda: {"max_model_len": 100_000}, "max_model_len=100000"),
    "context-one": (lambda: {"max_model_len": 1}, "max_model_len=1"),
    "pool-too-small": (
        lambda: {"cache": CacheConfig(max_bytes=1000)},
        "max_bytes=1000.*raise max_bytes",
    ),
    "pool-above-memory": (
        lambda: {"cache": CacheConfig(num_blocks=(1 << 23) - 1, block_size=256)},
        r"\d{13} bytes cannot be allocated.*KV cache \d{13}; lower CacheConfig.num_blocks",
    ),
    "unchunked-budget": (
        lambda: {
            "max_num_batched_tokens": 16,
            "cache": CacheConfig(enable_chunked_prefill=False),
        },
        "max_num_batched_tokens=16",
    ),
    "async": (lambda: {"async_steps": 2}, "async_steps=2"),
    "async drafts": (
        lambda: {"async_steps": 1, "speculative": "ngram:2"},
        "async_steps=1: proposer .ngram. needs the tokens",
    ),
    "graph": (lambda: {"capture": CaptureConfig(graph="cuda")}, "graph='cuda'"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_refused_before_weights(name: str, checkpoints: Checkpoints) -> None:
    """A fault that shows at the first request, or is blamed on another field, or is ignored."""
    make, message = FAULTS[name]
    phases: list[str] = []
    with pytest.raises(ValueError, match=message):
        LLM(checkpoints.get(), progress=lambda phase, *_: phases.append(phase), **make())
    assert phases == [], "weights were read before the fault was found"


def test_a_start_without_faults_reports_weights_then_capture(checkpoints: Checkpoints) -> None:
    """Guards the test above: weights that are read are reported."""
    phases: list[str] = []
    with LLM(
        checkpoints.get(),
        max_model_len=64,
        max_num_seqs=2,
        progress=lambda phase, *_: phases.append(phase),
    ):
        assert list(dict.fromkeys(phases)) == ["weights", "capture"]


def test_a_memory_budget_below_the_need_names_the_need(checkpoints: Checkpoints) -> None:
    """A start that takes more than it was allowed, or says no figure that would do (case 57)."""
    with pytest.raises(ValueError, match=r"memory_budget=1000.*need"):
        LLM(
            checkpoints.get(),
            max_model_len=64,
            capture=CaptureConfig(memory_budget=1000),
        )
