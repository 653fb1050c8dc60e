"""reject_rows and sample_rows: against the plain rule, and what comes out is what p says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from graphengine.bench.distributions import chi_square_p
from graphengine.kernels.library import load
from graphengine.sampling import noise
from graphengine.sampling.reference import RowSettings, reject
from graphengine.sampling.settings import NEUTRAL
from tests.graphengine.kernels.calls import Kernels
from tests.graphengine.kernels.test_reject import VOCAB, P, problems, run

pytest.importorskip("triton")

from graphengine.triton_kernels import chunks
from graphengine.triton_kernels.sample import sample_rows
from tests.graphengine.triton_kernels.launchers import Launchers

TRITON = Launchers()


@given(problem=problems())
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_kernel_is_the_plain_rule(problem: Any) -> None:
    """Acceptance, residual, the fall-back to p, row by row; the last is the sampler's."""
    processed, drafts, probs, seed = problem
    got = run(TRITON, processed, drafts, probs, seed=seed)
    want = [
        reject(
            processed[row].tolist(),
            draft,
            None if probs is None else probs[row].tolist(),
            RowSettings(seed=seed),
            11 + row,
        )
        for row, draft in enumerate(drafts)
    ]
    assert got == [*want, -7]


def test_rows_without_a_draft_and_greedy_rows_are_left_alone() -> None:
    """Guards a bonus token, a greedy one, or one of a row without any, that was replaced."""
    processed = torch.zeros(4, VOCAB)
    assert run(TRITON, processed, [1, 2, 3], None, num_drafts=1)[1:] == [-7] * 3
    assert run(TRITON, processed, [1, 2, 3], None, temperature=0.0) == [-7] * 4
    nothing = torch.full((2, VOCAB), -float("inf"))
    nothing[:, 3] = float("nan")
    assert run(TRITON, nothing, [1], None) == [-7] * 2


@pytest.mark.parametrize("size", [16, 4096])
def test_a_wide_vocabulary_is_as_on_the_cpu(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards chunks that know nothing of what others found: a q that leaves some of them empty."""
    monkeypatch.setattr(chunks, "CHUNK", size)
    generator = torch.Generator().manual_seed(size)
    processed = 3 * torch.randn(9, 77, generator=generator)
    processed -= processed.amax(1, keepdim=True)
    p = torch.softmax(processed[:-1].double(), 1)
    q = (p * (torch.rand(p.shape, generator=generator) > 0.7)).numpy()
    q = (q / q.sum(1, keepdims=True)).astype(np.float32)
    q[3] = p[3]  # nothing is left but rounding
    drafts = q.argmax(1).tolist()
    for probs in (q, None):
        wanted = run(Kernels(load()), processed, drafts, probs, seed=5)
        assert run(TRITON, processed, drafts, probs, seed=5) == wanted


def test_a_draft_that_cannot_come_is_not_accepted() -> None:
    """Guards strictness: u * 0 < 0 is false, for a draft that q cannot have given either."""
    processed = torch.zeros(2, VOCAB)
    processed[:, 3] = -float("inf")
    q = np.full((1, VOCAB), 1 / (VOCAB - 1), dtype=np.float32)
    q[0, 3] = 0.0
    assert run(TRITON, processed, [3], q)[0] not in (3, -7)


def test_the_fall_back_is_p() -> None:
    """Guards max(p - q, 0) of nothing: a q that is above p everywhere, and a draft p has not."""
    processed = torch.full((2, VOCAB), -float("inf"))
    processed[:, [2, 5]] = 0.0
    q = np.full((1, VOCAB), 0.75, dtype=np.float32)
    wanted = [run(Kernels(load()), processed, [0], q, seed=seed)[0] for seed in range(8)]
    assert [run(TRITON, processed, [0], q, seed=seed)[0] for seed in range(8)] == wanted
    assert set(wanted) == {2, 5}


def test_every_token_is_drawn_as_often_as_it_should() -> None:
    """Guards noise that favours a token: chi-square over positions, seeds fixed in advance."""
    num_draws, table = 150, np.array([NEUTRAL])
    table["temperature"], table["seed"] = 1.0, 123
    logits = torch.tensor([0.0, -1.0, -2.0, 0.5, -0.5, -3.0, float("-inf"), 0.25])
    ids = torch.full((num_draws,), -1, dtype=torch.int32)
    sample_rows(
        ids,
        logits.repeat(num_draws, 1),
        torch.arange(num_draws, dtype=torch.int32),
        torch.tensor([num_draws], dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        torch.from_numpy(table.view(np.int32)),
    )
    counts = np.bincount(ids.numpy(), minlength=VOCAB)
    assert chi_square_p(counts, torch.softmax(logits.double(), 0).numpy()) > 1e-3


def test_what_comes_out_is_distributed_as_the_target_says() -> None:
    """Guards the theorem's conditions: the true q, fresh noise, strict acceptance."""
    num_draws, q = 120, np.full(VOCAB, 1 / VOCAB)
    processed = torch.from_numpy(np.log(np.maximum(P / P.max(), 1e-300))).float()
    processed[P == 0] = float("-inf")
    drafts = [
        int(noise.gumbels(9, position=11 + row, stream=noise.DRAFT, count=VOCAB).argmax())
        for row in range(num_draws)
    ]
    probs = np.tile(q, (num_draws, 1)).astype(np.float32)
    ids = run(TRITON, processed.repeat(num_draws + 1, 1), drafts, probs, seed=9)[:-1]
    assert chi_square_p(np.bincount(ids, minlength=VOCAB), P) > 1e-3
