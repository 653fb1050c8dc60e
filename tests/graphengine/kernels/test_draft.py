"""The kernels of a chain of drafts: rows by slot and by index, shifted tokens, a draft's choice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import pytest
import torch

from graphengine.bench.distributions import chi_square_p
from graphengine.sampling import noise
from proposers.base import DraftSampling, RequestSampling
from proposers.drafting import DraftSampler
from proposers.requests import WORDS, write_requests
from tests.graphengine.kernels.calls import SUFFIX, Kernels, empty, threads

REQUESTS = (
    RequestSampling(temperature=0.0, seed=1),
    RequestSampling(temperature=0.7, seed=(1 << 64) - 1, choice=3),
    RequestSampling(temperature=1.0, seed=7),
    RequestSampling(temperature=2.5, seed=1 << 40),
)


@dataclass(frozen=True)
class Runtime:
    """As much of an engine as the definition of a draft reads."""

    vocab_size: int
    draft_sampling: DraftSampling
    max_model_len: int = 64
    max_num_seqs: int = 4
    max_draft_tokens: int = 3
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def gumbels(
        self, request: RequestSampling, position: int, stream: Literal["target", "draft"]
    ) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        which = noise.TARGET if stream == "target" else noise.DRAFT
        return noise.gumbels(
            request.seed,
            position=position,
            stream=which,
            choice=request.choice,
            count=self.vocab_size,
        )


@dataclass
class Chosen:
    """What one call gave: [R] ids, and [R, vocab] distributions where they are drawn."""

    ids: list[int]
    drafts: torch.Tensor
    probs: torch.Tensor


def choose(
    kernels: Kernels,
    logits: torch.Tensor,
    sampling: DraftSampling,
    *,
    tokens: torch.Tensor | None = None,
    vocab_size: int | None = None,
    requests: tuple[RequestSampling, ...] = REQUESTS,
    num_tokens: int = 10,
    step: int = 1,
) -> Chosen:
    num_reqs, width, query_len = len(logits), logits.shape[1], 3
    vocab = vocab_size or width
    rows = torch.zeros(num_reqs, WORDS, dtype=torch.int32)
    write_requests(rows.numpy(), requests[:num_reqs], [num_tokens] * num_reqs)
    chosen, drafts = (
        empty(num_reqs, dtype=torch.int32),
        empty(num_reqs * query_len, dtype=torch.int32),
    )
    probs = empty(num_reqs, query_len, vocab)
    mode = get_args(DraftSampling).index(sampling)
    given = probs if sampling == "probabilistic" else None
    kernels.call(
        "choose_drafts",
        chosen,
        drafts,
        given,
        logits.clone(),
        tokens,
        rows,
        num_reqs,
        width,
        vocab,
        query_len,
        step,
        mode,
    )
    return Chosen(chosen.tolist(), drafts.view(num_reqs, query_len), probs[:, step])


@pytest.mark.parametrize("sampling", get_args(DraftSampling))
@pytest.mark.parametrize("vocab", [5, 64, 200])
def test_a_draft_is_the_one_of_the_definition(
    kernels: Kernels, sampling: DraftSampling, vocab: int
) -> None:
    """Guards temperature, seed, choice, stream and position, each of which moves the noise."""
    sampler = DraftSampler(Runtime(vocab, sampling))
    generator = torch.Generator().manual_seed(vocab)
    for turn in range(40):
        logits = 3 * torch.randn(4, vocab, generator=generator)
        logits[:, turn % vocab] = float("-inf")
        found = choose(kernels, logits, sampling, num_tokens=turn)
        for row, request in enumerate(REQUESTS):
            wanted = sampler.choose(logits[row].double().numpy(), request, turn + 1)
            assert found.ids[row] == wanted.token_id, (turn, row)
            assert found.drafts[row].tolist() == [-1, wanted.token_id, -1]
            if wanted.probs is not None:
                assert np.allclose(found.probs[row].numpy(), wanted.probs, atol=1e-6)


@pytest.mark.parametrize("sampling", get_args(DraftSampling))
def test_a_draft_vocabulary_is_that_of_the_target_with_holes(
    kernels: Kernels, sampling: DraftSampling
) -> None:
    """Guards case 36: ids, noise and distribution are those of the tokens behind the columns."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.tensor([3, 40, 7, 63, 0, 22, 41], dtype=torch.int32)  # not ascending
    for turn in range(40):
        small = 3 * torch.randn(4, len(tokens), generator=generator)
        wide = torch.full((4, 64), float("-inf"))
        wide[:, tokens.long()] = small
        mapped = choose(kernels, small, sampling, tokens=tokens, vocab_size=64, num_tokens=turn)
        plain = choose(kernels, wide, sampling, num_tokens=turn)
        assert mapped.ids == plain.ids
        if sampling == "probabilistic":
            assert torch.equal(mapped.probs, plain.probs)
            outside = sorted(set(range(64)) - set(tokens.tolist()))
            assert (mapped.probs[:, outside] == 0).all()


def test_drawn_drafts_follow_the_distribution_that_is_handed_over(kernels: Kernels) -> None:
    """Guards case 4: the q of the test is the q that drew the draft."""
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, 0.5]])
    counts = np.zeros(5)
    for seed in range(4000):
        request = RequestSampling(temperature=0.7, seed=seed)
        found = choose(kernels, logits, "probabilistic", requests=(request,))
        counts[found.ids[0]] += 1
    assert chi_square_p(counts, found.probs[0].double().numpy()) > 1e-3


@pytest.mark.parametrize("sampling", get_args(DraftSampling))
def test_rows_without_a_number_draft_the_lowest_id(
    kernels: Kernels, sampling: DraftSampling
) -> None:
    """Guards garbage rows of padding: whatever they hold, the id is one of the vocabulary."""
    logits = torch.full((4, 9), float("nan"))
    logits[1] = float("-inf")
    logits[2, 4] = 1.0
    logits[3, 5:] = float("inf")
    found = choose(kernels, logits, sampling)
    assert found.ids[:3] == [0, 0, 4]
    assert 5 <= found.ids[3] < 9


@pytest.mark.parametrize("dtype", SUFFIX)
def test_hidden_states_are_kept_by_slot(kernels: Kernels, dtype: torch.dtype) -> None:
    """Guards columns of several taps, and the null block, where padding would write."""
    cache = torch.zeros(12, 6, dtype=dtype)
    slots = torch.tensor([4, 11, 3, 0], dtype=torch.int32)
    first, second = torch.randn(4, 3), torch.randn(4, 3)
    for column, x in ((0, first), (3, second)):
        kernels.call(f"store_slots_{SUFFIX[dtype]}", cache, x, slots, 4, 3, 6, column, 4)
    expected = torch.zeros(12, 6, dtype=dtype)
    expected[[4, 11]] = torch.cat([first, second], dim=1)[:2].to(dtype)
    assert torch.equal(cache, expected)
    out = empty(4, 6)
    kernels.call(f"load_slots_{SUFFIX[dtype]}", out, cache, slots, 4, 6)
    assert torch.equal(out, expected[slots.long()].float())


def test_rows_are_picked_and_joined(kernels: Kernels) -> None:
    x, y = torch.randn(7, 5), torch.randn(7, 3)
    rows = torch.tensor([6, 0, 3], dtype=torch.int32)
    picked, joined = empty(3, 5), empty(7, 8)
    kernels.call("take_rows", picked, x, rows, 3, 5)
    kernels.call("concat_rows", joined, x, y, 7, 5, 3)
    assert torch.equal(picked, x[rows.long()])
    assert torch.equal(joined, torch.cat([x, y], dim=1))


def test_rows_at_position_0_are_zeroed(kernels: Kernels) -> None:
    """Guards a row at another position, and a row that is no number."""
    x = torch.randn(4, 5)
    x[2] = float("nan")
    out, positions = x.clone(), torch.tensor([3, 0, 0, 1], dtype=torch.int32)
    kernels.call("zero_first", out, positions, 4, 5)
    assert torch.equal(out[[0, 3]], x[[0, 3]])
    assert not out[1:3].any()


def test_tokens_are_shifted_request_by_request(kernels: Kernels) -> None:
    """Guards the window of a deeper head: one token on, the newest draft last, padding behind."""
    tokens = torch.tensor([1, 2, 3, 0, 5, 0, 0, 0], dtype=torch.int32)
    last, newest = torch.tensor([2, 4], dtype=torch.int32), torch.tensor([8, 9], dtype=torch.int32)
    out = empty(8, dtype=torch.int32)
    kernels.call("shift_tokens", out, tokens, last, newest, 2, 4)
    assert out.tolist() == [2, 3, 8, 0, 9, 0, 0, 0]
    kernels.call("shift_tokens", out, out, last, newest, 2, 4)  # in place
    assert out.tolist() == [3, 8, 8, 0, 9, 0, 0, 0]


def test_choices_do_not_depend_on_threads_or_company(native: Kernels) -> None:
    logits = 3 * torch.randn(4, 5000, generator=torch.Generator().manual_seed(0))
    for sampling in get_args(DraftSampling):
        found = []
        for count in (1, 2, 3):
            with threads(count):
                found.append(choose(native, logits, sampling).ids)
        alone = [
            choose(native, logits[row : row + 1], sampling, requests=REQUESTS[row : row + 1]).ids[0]
            for row in range(4)
        ]
        assert found[0] == found[1] == found[2] == alone
