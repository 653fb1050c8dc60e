"""Random models, engines, proposers and schedules against plain decoding; see `random_runs`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.parity.random_runs import Run, run_case

pytestmark = pytest.mark.parity

FAST_SEEDS = range(8)
SOAK_SEEDS = range(1000, 3000)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the random models live, each made once."""
    return tmp_path_factory.mktemp("random-models")


def check_variety(runs: list[Run]) -> None:
    """What the runs must have met, or they proved little."""
    seen: Counter[str] = Counter()
    for request in (request for run in runs for request in run.harness.requests.values()):
        metrics = request.metrics
        seen["accepted"] += metrics.num_accepted_tokens
        seen["rejected"] += metrics.num_draft_tokens - metrics.num_accepted_tokens
        seen["preempted"] += metrics.num_preemptions
        seen["cached"] += metrics.num_cached_tokens
        seen[str(request.finish_reason)] += 1
    wanted = {"accepted", "rejected", "preempted", "cached", "stop", "length", "abort"}
    assert wanted <= set(+seen), seen
    assert any(run.proposer.num_breaches for run in runs)


def test_a_few_seeds(models: Path) -> None:
    """A token or a bit that depends on anything but the request's own prefix."""
    for seed in FAST_SEEDS:
        run_case(seed, models)


@pytest.mark.soak
@pytest.mark.parametrize("first", SOAK_SEEDS[::100])
def test_many_seeds(first: int, models: Path) -> None:
    """The same, for long."""
    check_variety([run_case(seed, models) for seed in range(first, first + 100)])
