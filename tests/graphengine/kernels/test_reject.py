"""reject_rows: against the plain loops, and what comes out is distributed as the target says."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphengine.bench.distributions import chi_square_p
from graphengine.sampling import noise
from graphengine.sampling.reference import RowSettings, reject
from graphengine.sampling.settings import DTYPE
from tests.graphengine.kernels.calls import Kernels, threads

VOCAB = 8
Probs = npt.NDArray[np.float32]


def run(
    kernels: Kernels,
    processed: torch.Tensor,
    drafts: list[int],
    probs: Probs | None,
    *,
    seed: int = 0,
    temperature: float = 1.0,
    num_drafts: int | None = None,
) -> list[int]:
    """One request of a block: rows [n + 1, vocab] and n drafts; the sampler's choice is -7."""
    num_rows, vocab = processed.shape
    table = np.zeros(1, dtype=DTYPE)
    table["temperature"], table["seed"] = temperature, seed
    q = torch.full((num_rows, vocab), float("nan"))
    if probs is not None:
        q[: num_rows - 1] = torch.from_numpy(probs)
    ids = torch.full((num_rows,), -7, dtype=torch.int32)
    kernels.call(
        "reject_rows",
        ids,
        processed.contiguous(),
        q,
        torch.tensor([0, *drafts], dtype=torch.int32),
        torch.arange(10, 10 + num_rows, dtype=torch.int32),
        torch.tensor([num_rows], dtype=torch.int32),
        torch.tensor([len(drafts) if num_drafts is None else num_drafts], dtype=torch.int32),
        torch.tensor([int(probs is not None)], dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        torch.from_numpy(table.view(np.int32)),
        num_rows,
        vocab,
    )
    return ids.tolist()


@st.composite
def problems(draw: Any) -> tuple[torch.Tensor, list[int], Probs | None, int]:
    """Rows of which some tokens cannot come, and drafts with a q that may be anything."""
    num_drafts = draw(st.integers(1, 4))
    number = st.floats(-9, 0, width=32) | st.sampled_from([float("-inf"), 0.0, -30.0])
    rows = draw(st.lists(number, min_size=num_drafts * VOCAB, max_size=num_drafts * VOCAB))
    processed = torch.tensor(rows).view(num_drafts, VOCAB)
    processed[:, draw(st.integers(0, VOCAB - 1))] = 0.0  # the likeliest of a scaled row
    processed = torch.cat((processed, torch.zeros(1, VOCAB)))
    drafts = draw(st.lists(st.integers(0, VOCAB - 1), min_size=num_drafts, max_size=num_drafts))
    kind = draw(st.sampled_from(["none", "other", "same", "one-hot"]))
    seed = draw(st.integers(0, (1 << 64) - 1))
    if kind == "none":
        return processed, drafts, None, seed
    q = np.random.default_rng(seed).dirichlet(np.full(VOCAB, 0.3), num_drafts)
    if kind == "same":
        q = torch.softmax(processed[:-1].double(), 1).numpy()
        drafts = q.argmax(axis=1).tolist()  # a draft can only be what q may give
    if kind == "one-hot":
        q = np.eye(VOCAB)[drafts]
    return processed, drafts, q.astype(np.float32), seed


@given(problem=problems())
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_kernel_is_the_plain_rule(kernels: Kernels, problem: Any) -> None:
    """Acceptance, residual, the fall-back to p, row by row (case 3); the last is the sampler's."""
    processed, drafts, probs, seed = problem
    got = run(kernels, processed, drafts, probs, seed=seed)
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


def test_rows_without_a_draft_and_greedy_rows_are_left_alone(native: Kernels) -> None:
    """Guards a bonus token, or a greedy one, that the residual has replaced."""
    processed = torch.zeros(4, VOCAB)
    assert run(native, processed, [1, 2, 3], None, num_drafts=1)[1:] == [-7] * 3
    assert run(native, processed, [1, 2, 3], None, temperature=0.0) == [-7] * 4


P = np.array([0.3, 0.0, 0.15, 0.25, 0.05, 0.2, 0.05, 0.0])
DRAFTS = {
    "greedy": None,
    "same": P,
    "disjoint": np.array([0.0, 0.5, 0, 0, 0, 0, 0, 0.5]),
    "one-hot": np.eye(VOCAB)[3],
    "tiny": np.array([1 - 7e-6, *[1e-6] * 7]),
    "flat": np.full(VOCAB, 1 / VOCAB),
}
NUM_DRAWS = 50_000


def gumbel_rows(seed: int, stream: int) -> npt.NDArray[np.float64]:
    """`noise.gumbels` [NUM_DRAWS, VOCAB] of the positions from 11 on, all at once."""
    shape = (NUM_DRAWS, VOCAB // 4)
    positions, blocks = np.indices(shape, dtype=np.uint64)
    streams, choices = np.full(shape, stream, np.uint64), np.zeros(shape, np.uint64)
    words = noise.philox((blocks, positions + np.uint64(11), streams, choices), seed)
    rows = -np.log(-np.log1p(-(words.reshape(NUM_DRAWS, VOCAB) + 0.5) * 2.0**-32))
    for row in (0, 1, NUM_DRAWS - 1):
        one = noise.gumbels(seed, position=11 + row, stream=stream, count=VOCAB)
        assert np.array_equal(rows[row], one)
    return rows


def draw_stream(
    native: Kernels, q: npt.NDArray[Any] | None, seed: int, stream: int = noise.DRAFT
) -> npt.NDArray[Any]:
    """First tokens of many positions whose drafts come from q by the draft's own noise."""
    processed = torch.from_numpy(np.log(np.maximum(P / P.max(), 1e-300))).float()
    processed[P == 0] = float("-inf")
    if q is None:
        drafts = [int(P.argmax())] * NUM_DRAWS
    else:
        with np.errstate(divide="ignore"):
            drafts = np.argmax(np.log(q) + gumbel_rows(seed, stream), axis=1).tolist()
    probs = None if q is None else np.tile(q, (NUM_DRAWS, 1)).astype(np.float32)
    rows = processed.repeat(NUM_DRAWS + 1, 1)
    return np.bincount(run(native, rows, drafts, probs, seed=seed)[:-1], minlength=VOCAB)


@pytest.mark.parametrize("name", DRAFTS)
def test_what_comes_out_is_distributed_as_the_target_says(native: Kernels, name: str) -> None:
    """Guards the theorem's conditions: the true q, fresh noise, strict acceptance (cases 3, 4)."""
    with threads(2):
        assert chi_square_p(draw_stream(native, DRAFTS[name], seed=2026), P) > 1e-3


def test_draft_noise_used_again_is_caught(native: Kernels) -> None:
    """The test above must see a residual drawn with the noise that drew the draft."""
    biased = draw_stream(native, DRAFTS["flat"], seed=2026, stream=noise.RESIDUAL)
    assert chi_square_p(biased, P) < 1e-6
