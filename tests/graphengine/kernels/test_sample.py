"""process_logits, sample_rows and their noise: against the plain loops, row by row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphengine.bench.distributions import chi_square_p
from graphengine.sampling import noise
from graphengine.sampling.reference import RowSettings, process, sample
from graphengine.sampling.settings import DTYPE, MASK, PENALTIES
from tests.graphengine.kernels.calls import Kernels, empty, threads

VOCAB = 8
MAX_BIAS = 3
# Random123's own answers for Philox 4x32-10: counter, key, words.
KNOWN = (
    ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (1 << 64) - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0A4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_is_the_published_one(
    counter: tuple[int, ...], key: int, expected: tuple[int, ...]
) -> None:
    """Guards a generator of our own making, whose quality nobody has shown."""
    words = noise.philox(tuple(np.array(c, dtype=np.uint64) for c in counter), key)  # type: ignore[arg-type]
    assert tuple(words.tolist()) == expected


class Block:
    """One call of both kernels: requests of `query_len` rows each, state rows in another order."""

    def __init__(
        self,
        logits: torch.Tensor,
        rows: list[RowSettings],
        prompts: list[list[int]],
        outputs: list[list[int]],
        drafts: list[list[int]],
    ) -> None:
        self.num_reqs, self.query_len, self.vocab = logits.shape
        self.logits, self.rows, self.drafts = logits.contiguous(), rows, drafts
        self.prompts, self.outputs = prompts, outputs
        num_states = self.num_reqs + 2
        self.state_rows = torch.arange(self.num_reqs, 0, -1, dtype=torch.int32)
        self.settings = np.zeros(num_states, dtype=DTYPE)
        self.counts = torch.zeros(num_states, self.vocab, dtype=torch.int32)
        self.in_prompt = torch.zeros(num_states, self.vocab, dtype=torch.uint8)
        self.bias_ids = torch.zeros(num_states, MAX_BIAS, dtype=torch.int32)
        self.bias_values = torch.full((num_states, MAX_BIAS), float("nan"))
        words = -(-self.vocab // 32)
        self.mask = torch.zeros(self.num_reqs * self.query_len, words, dtype=torch.int32)
        self.token_ids = torch.zeros(self.num_reqs, self.query_len, dtype=torch.int32)
        self.positions = torch.zeros(self.num_reqs, self.query_len, dtype=torch.int32)
        for index, state in enumerate(self.state_rows.tolist()):
            self._fill(index, state)

    def _fill(self, index: int, state: int) -> None:
        row, prompt, output = self.rows[index], self.prompts[index], self.outputs[index]
        entry = self.settings[state]
        for name in ("temperature", "top_k", "top_p", "min_p", "seed", "choice"):
            entry[name] = getattr(row, name)
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
            entry[name] = getattr(row, name)
            if getattr(row, name) != getattr(RowSettings(), name):
                entry["flags"] |= PENALTIES
        for token in output:
            self.counts[state, token] += 1
        self.in_prompt[state, prompt] = 1
        entry["num_bias"] = len(row.logit_bias)
        for place, (token, value) in enumerate(row.logit_bias.items()):
            self.bias_ids[state, place], self.bias_values[state, place] = token, value
        if row.allowed is not None:
            entry["flags"] |= MASK
            bits = np.zeros(self.mask.shape[1], dtype=np.uint32)
            for token in row.allowed:
                bits[token // 32] |= np.uint32(1 << token % 32)
            rows = slice(index * self.query_len, (index + 1) * self.query_len)
            self.mask[rows] = torch.from_numpy(bits.view(np.int32))
        self.token_ids[index, 1:] = torch.tensor(self.drafts[index], dtype=torch.int32)
        start = len(prompt) + len(output) - 1
        self.positions[index] = torch.arange(start, start + self.query_len)

    def run(self, kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor]:
        """Processed logits [num_reqs, query_len, vocab] and token ids [num_reqs, query_len]."""
        num_rows = self.num_reqs * self.query_len
        query_len = torch.tensor([self.query_len], dtype=torch.int32)
        table = torch.from_numpy(self.settings.view(np.int32))
        processed, ids = empty(*self.logits.shape), empty(num_rows, dtype=torch.int32)
        kernels.call(
            "process_logits", processed, self.logits, self.token_ids, query_len, self.state_rows,
            table, self.counts, self.in_prompt, self.bias_ids, self.bias_values, self.mask,
            num_rows, self.vocab, MAX_BIAS,
        )  # fmt: skip
        kernels.call(
            "sample_rows", ids, processed, self.positions, query_len, self.state_rows, table,
            num_rows, self.vocab,
        )  # fmt: skip
        return processed, ids.view(self.num_reqs, self.query_len)

    def expected(self) -> tuple[list[list[list[float]]], list[list[int]]]:
        """What `run` should give, by the plain loops, each row seeing the drafts before it."""
        processed, ids = [], []
        for index, row in enumerate(self.rows):
            prompt, output = self.prompts[index], self.outputs[index]
            processed.append(
                [
                    process(
                        self.logits[index, offset].tolist(),
                        row,
                        prompt,
                        [*output, *self.drafts[index][:offset]],
                    )
                    for offset in range(self.query_len)
                ]
            )
            start = len(prompt) + len(output)
            ids.append([sample(x, row, start + j) for j, x in enumerate(processed[-1])])
        return processed, ids


def row_settings() -> st.SearchStrategy[RowSettings]:
    f32 = {"width": 32, "allow_nan": False}
    return st.builds(
        RowSettings,
        temperature=st.sampled_from([0.0, 1.0, 0.5, 1e-4, 30.0, 1e30]),
        top_k=st.sampled_from([0, 1, 2, 5, 8, 9]),
        top_p=st.sampled_from([1.0, 0.9, 0.5, 0.1, 2.0**-30]),
        min_p=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 1.5, 0.5]),
        frequency_penalty=st.sampled_from([0.0, 0.75, -1.0]),
        presence_penalty=st.sampled_from([0.0, 0.5, -2.0]),
        logit_bias=st.dictionaries(
            st.integers(0, VOCAB - 1), st.floats(-8, 8, **f32), max_size=MAX_BIAS
        ),
        allowed=st.none() | st.sets(st.integers(0, VOCAB - 1), min_size=1),
        seed=st.integers(0, (1 << 64) - 1),
        choice=st.integers(0, 3),
    )


@st.composite
def blocks(draw: Any) -> Block:
    num_reqs, query_len = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    ids = st.integers(0, VOCAB - 1)
    extremes = st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 1e30, -1e30])
    numbers = st.floats(-9, 9, width=32) | st.sampled_from([1.0, 1.0, 2.0]) | extremes
    shape = num_reqs * query_len * VOCAB
    logits = torch.tensor(draw(st.lists(numbers, min_size=shape, max_size=shape)))
    each = {"min_size": num_reqs, "max_size": num_reqs}
    return Block(
        logits.view(num_reqs, query_len, VOCAB),
        draw(st.lists(row_settings(), **each)),
        draw(st.lists(st.lists(ids, min_size=1, max_size=4), **each)),
        draw(st.lists(st.lists(ids, max_size=6), **each)),
        draw(st.lists(st.lists(ids, min_size=query_len - 1, max_size=query_len - 1), **each)),
    )


@given(block=blocks())
@settings(
    max_examples=300,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_kernels_are_the_plain_loops(kernels: Kernels, block: Block) -> None:
    """Every parameter on every row, drafts before it seen, extreme numbers and ties."""
    processed, ids = block.run(kernels)
    want_processed, want_ids = block.expected()
    torch.testing.assert_close(
        processed.double(),
        torch.tensor(want_processed).double(),
        rtol=1e-6,
        atol=1e-6,
        equal_nan=True,
    )
    assert ids.tolist() == want_ids


ROWS = (
    RowSettings(seed=1),
    RowSettings(temperature=1e6, seed=2),
    RowSettings(temperature=0.2, top_k=40, top_p=0.8, seed=3, choice=2),
    RowSettings(top_p=0.99, min_p=0.01, seed=1 << 63),
    RowSettings(temperature=0.0, repetition_penalty=1.3),
    RowSettings(temperature=3.0, frequency_penalty=0.4, presence_penalty=0.1, top_k=1000, seed=5),
    RowSettings(allowed=range(0, 1003, 7), logit_bias={7: 30.0, 8: 30.0}, seed=6),
)


def wide_block(query_len: int = 3, vocab: int = 1003) -> Block:
    """A vocabulary that fills neither a vector, a mask word nor a noise group."""
    generator = torch.Generator().manual_seed(0)
    rng = np.random.default_rng(0)

    def ids(count: int) -> list[list[int]]:
        return [rng.integers(0, vocab, count).tolist() for _ in ROWS]

    logits = 4 * torch.randn(len(ROWS), query_len, vocab, generator=generator)
    return Block(logits, list(ROWS), ids(30), ids(20), ids(query_len - 1))


def test_a_wide_vocabulary(kernels: Kernels) -> None:
    """Guards the shortcuts that few tokens never take: skipped groups, radix digits, tails."""
    block = wide_block()
    processed, ids = block.run(kernels)
    want_processed, want_ids = block.expected()
    torch.testing.assert_close(
        processed.double(), torch.tensor(want_processed).double(), rtol=1e-6, atol=1e-6
    )
    assert ids.tolist() == want_ids


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_a_row_is_the_same_in_any_company(native: Kernels, num_threads: int) -> None:
    """Guards sums whose order follows threads, and a request that reads its neighbour's row."""
    processed, ids = wide_block().run(native)
    with threads(num_threads):
        again, ids_again = wide_block(3).run(native)  # enough work for all threads
        assert torch.equal(again.view(torch.int32), processed.view(torch.int32))
        assert torch.equal(ids_again, ids)
        for index in range(len(ROWS)):
            alone = wide_block()
            one = slice(index, index + 1)
            single = Block(
                alone.logits[one],
                alone.rows[one],
                alone.prompts[one],
                alone.outputs[one],
                alone.drafts[one],
            )
            again, id_again = single.run(native)
            assert torch.equal(again.view(torch.int32), processed[one].view(torch.int32))
            assert torch.equal(id_again, ids[one])


def test_every_token_is_drawn_as_often_as_it_should(native: Kernels) -> None:
    """Guards noise that favours a token: chi-square over positions, seeds fixed in advance."""
    num_draws, row = 40_000, RowSettings(seed=123)
    logits = torch.tensor([0.0, -1.0, -2.0, 0.5, -0.5, -3.0, float("-inf"), 0.25])
    block = Block(logits.repeat(1, num_draws, 1), [row], [[0]], [[]], [[0] * (num_draws - 1)])
    _, ids = block.run(native)
    counts = np.bincount(ids.flatten().numpy(), minlength=VOCAB)
    assert chi_square_p(counts, torch.softmax(logits.double(), 0).numpy()) > 1e-3


def test_streams_choices_and_seeds_share_nothing() -> None:
    """Guards a residual drawn with the noise that drew the draft, and n answers that are one."""
    places = [
        {"seed": 7, "position": 3, "stream": noise.TARGET},
        {"seed": 7, "position": 3, "stream": noise.DRAFT},
        {"seed": 7, "position": 3, "stream": noise.ACCEPTANCE},
        {"seed": 7, "position": 3, "stream": noise.RESIDUAL},
        {"seed": 7, "position": 4, "stream": noise.TARGET},
        {"seed": 8, "position": 3, "stream": noise.TARGET},
        {"seed": 7, "position": 3, "stream": noise.TARGET, "choice": 1},
        {"seed": 7 + (1 << 32), "position": 3, "stream": noise.TARGET},
    ]
    draws = np.array([noise.uniforms(**place, count=20_000) for place in places])
    assert 0 < draws.min() < draws.max() < 1
    correlations = np.corrcoef(draws) - np.eye(len(places))
    assert np.abs(correlations).max() < 4.5 / math.sqrt(20_000)
    assert np.abs(draws.mean(axis=1) - 0.5).max() < 4.5 / math.sqrt(12 * 20_000)
