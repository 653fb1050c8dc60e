"""The kernels' noise: the words, uniforms and Gumbel numbers of the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphengine.sampling import noise

triton = pytest.importorskip("triton")
tl = triton.language

from graphengine.triton_kernels import noise as kernels  # noqa: E402

COUNT = 256
SEEDS = (0, 7, 1 << 40, (1 << 64) - 1, (1 << 63) + 12345)


@triton.jit
def _draw(words, scattered, uniforms, gumbels, rough, entry, position, STREAM: tl.constexpr):
    place = kernels.place_of(entry, position, STREAM)
    lanes = tl.arange(0, 256)
    found = kernels.words_from(0, place, 256)
    tl.store(words + lanes, found.to(tl.int64))
    backwards = 255 - lanes
    tl.store(scattered + backwards, kernels.words_of(backwards, place).to(tl.int64))
    tl.store(uniforms + lanes, kernels.uniform(found))
    tl.store(gumbels + lanes, kernels.gumbel(found))
    tl.store(rough + lanes, kernels.rough_gumbel(found))


@triton.jit
def _numbers(gumbels, rough, words):
    lanes = tl.arange(0, 16)
    word = kernels.as_word(tl.load(words + lanes))
    tl.store(gumbels + lanes, kernels.gumbel(word))
    tl.store(rough + lanes, kernels.rough_gumbel(word))


@triton.jit
def _best(values, tokens, numbers, words, LOG: tl.constexpr):
    lanes = tl.arange(0, 16)
    word = kernels.as_word(tl.load(words + lanes))
    value, lane = kernels.noisy_best(tl.load(numbers + lanes), word, lanes, lanes < 12, 99, LOG)
    tl.store(values, value)
    tl.store(tokens, lane)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "stream", [noise.TARGET, noise.DRAFT, noise.ACCEPTANCE, noise.RESIDUAL], ids=hex
)
def test_the_noise_is_that_of_the_definition(seed: int, stream: int) -> None:
    """Guards a seed's high word, a stream above 2^31, and words out of their order."""
    place = {"position": 77, "stream": stream, "choice": 3}
    entry = np.array([seed & 0xFFFFFFFF, seed >> 32, 3], dtype=np.uint32).view(np.int32)
    words, scattered = (torch.zeros(COUNT, dtype=torch.int64) for _ in range(2))
    uniforms, gumbels = (torch.zeros(COUNT, dtype=torch.float64) for _ in range(2))
    rough = torch.zeros(COUNT)
    _draw[(1,)](words, scattered, uniforms, gumbels, rough, torch.from_numpy(entry), 77, stream)
    wanted = noise.uniforms(seed, **place, count=COUNT)
    assert np.array_equal(uniforms.numpy(), wanted)
    assert np.array_equal(words.numpy(), (wanted * 2.0**32 - 0.5).astype(np.int64))
    assert torch.equal(scattered, words)
    exact = noise.gumbels(seed, **place, count=COUNT)
    np.testing.assert_allclose(gumbels.numpy(), exact, rtol=1e-14, atol=1e-14)
    assert np.abs(rough.numpy() - exact).max() < 1e-4 < kernels.SLACK.value / 2


def test_the_tails_are_fine() -> None:
    """Guards the largest numbers, which decide, and the smallest, of which a logarithm is 0."""
    edges = [0, 1, 2, 3, 1000, 1 << 26, (1 << 26) - 1, 1 << 31]
    words = np.array([*edges, *(0xFFFFFFFF - edge for edge in edges)], dtype=np.uint32)
    gumbels, rough = torch.zeros(16, dtype=torch.float64), torch.zeros(16)
    _numbers[(1,)](gumbels, rough, torch.from_numpy(words.view(np.int32)))
    u = (words.astype(np.float64) + 0.5) * 2.0**-32
    exact = -np.log(-np.log1p(-u))
    assert exact.max() < 22.88
    assert exact.min() > -3.14
    np.testing.assert_allclose(gumbels.numpy(), exact, rtol=1e-14, atol=1e-14)
    assert np.abs(rough.numpy() - exact).max() < kernels.SLACK.value / 2


def best(numbers: torch.Tensor, words: list[int], *, log: bool = False) -> tuple[float, int]:
    value, token = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int32)
    given = torch.from_numpy(np.array(words, dtype=np.uint32).view(np.int32))
    _best[(1,)](value, token, numbers, given, log)
    return value.item(), token.item()


def test_equal_sums_break_to_the_lowest_lane() -> None:
    """Guards planted ties, and lanes beyond the row, of which 12 there are."""
    numbers = torch.full((16,), -1.0)
    numbers[[3, 5, 9]] = 0.0
    words = [1 << 31] * 16
    value, lane = best(numbers, words)
    assert lane == 3
    assert value == pytest.approx(-np.log(-np.log1p(-0.5)), abs=1e-9)
    numbers[13] = 5.0
    assert best(numbers, words)[1] == 3


def test_what_fp32_cannot_tell_apart_float64_does() -> None:
    """Guards the exact pass: two words next to each other, the smaller of which is larger noise."""
    words = [(1 << 31) + 1000] * 16
    words[7] -= 1
    assert best(torch.zeros(16), words)[1] == 7
    assert best(torch.ones(16), words, log=True)[1] == 7


def test_sums_within_the_rough_ones_rounding_are_told_apart() -> None:
    """Guards an exact pass over the roughly largest alone: pairs a rounding of fp32 apart."""
    words = np.random.default_rng(0).integers(0, 1 << 32, (30, 16), dtype=np.uint64)
    gumbels = -np.log(-np.log1p(-(words + 0.5) * 2.0**-32))
    for trial in range(len(words)):
        numbers = np.full(16, -40.0, dtype=np.float32)
        numbers[4] = 0.0
        numbers[9] = np.float32(gumbels[trial, 4] - gumbels[trial, 9])
        sums = numbers.astype(np.float64) + gumbels[trial]
        _, lane = best(torch.from_numpy(numbers), words[trial].tolist())
        assert lane == (4 if sums[4] >= sums[9] else 9)


def test_nothing_is_chosen_where_nothing_is_live() -> None:
    inf = float("inf")
    assert best(torch.full((16,), -inf), [5] * 16) == (-inf, 99)
    assert best(torch.full((16,), float("nan")), [5] * 16) == (-inf, 99)
    assert best(torch.zeros(16), [5] * 16, log=True) == (-inf, 99)
    ruled_out = torch.full((16,), -inf)
    ruled_out[11] = -60.0
    assert best(ruled_out, [5] * 16)[1] == 11
