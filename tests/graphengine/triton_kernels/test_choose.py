"""choose_drafts: the drafts of the definition, and the target's token where the two agree."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch

from graphengine.kernels.library import load
from graphengine.sampling.reference import RowSettings
from proposers.base import DraftSampling, RequestSampling
from proposers.drafting import DraftSampler
from proposers.requests import REQUEST
from proposers.requests import WORDS as REQUEST_WORDS
from tests.graphengine.kernels.calls import Kernels
from tests.graphengine.kernels.test_draft import REQUESTS, Runtime, choose
from tests.graphengine.kernels.test_draft import (
    test_rows_without_a_number_draft_the_lowest_id as check_rows_without_a_number,
)
from tests.graphengine.kernels.test_sample import Block

pytest.importorskip("triton")

from graphengine.triton_kernels import choose as kernels
from graphengine.triton_kernels import chunks
from tests.graphengine.triton_kernels.launchers import Launchers

TRITON = Launchers()
SAMPLINGS = get_args(DraftSampling)


def test_a_request_is_laid_out_as_proposers_write_it() -> None:
    """Guards a field that has moved on one side of a border that no import crosses."""
    assert REQUEST.fields is not None
    found = {name: field[1] // 4 for name, field in REQUEST.fields.items()}
    assert kernels.WORDS.value == REQUEST_WORDS
    assert kernels.TEMPERATURE.value == found["temperature"]
    assert kernels.NUM_TOKENS.value == found["num_tokens"]
    seed = kernels.SEED.value
    assert [found[name] for name in ("seed_low", "seed_high", "choice")] == [*range(seed, seed + 3)]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("vocab", "size"), [(5, 4096), (200, 4096), (75, 16)])
def test_a_draft_is_the_one_of_the_definition(
    sampling: DraftSampling, vocab: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards temperature, seed, choice, stream and position, each of which moves the noise."""
    monkeypatch.setattr(chunks, "CHUNK", size)
    sampler = DraftSampler(Runtime(vocab, sampling))
    generator = torch.Generator().manual_seed(vocab)
    for turn in range(4):
        logits = 3 * torch.randn(4, vocab, generator=generator)
        logits[:, turn % vocab] = float("-inf")
        before = logits.clone()
        found = choose(TRITON, logits, sampling, num_tokens=turn)
        native = choose(Kernels(load()), logits, sampling, num_tokens=turn)
        assert torch.equal(logits, before)
        assert found.ids == native.ids
        for row, request in enumerate(REQUESTS):
            wanted = sampler.choose(logits[row].double().numpy(), request, turn + 1)
            assert found.ids[row] == wanted.token_id, (turn, row)
            assert found.drafts[row].tolist() == [-1, wanted.token_id, -1]
            if wanted.probs is not None:
                assert np.allclose(found.probs[row].numpy(), wanted.probs, atol=1e-6)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_draft_vocabulary_is_that_of_the_target_with_holes(sampling: DraftSampling) -> None:
    """Guards ids, noise and distribution: they are those of the tokens behind the columns."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.tensor([3, 40, 7, 63, 0, 22, 41], dtype=torch.int32)  # not ascending
    for turn in range(4):
        small = 3 * torch.randn(4, len(tokens), generator=generator)
        wide = torch.full((4, 64), float("-inf"))
        wide[:, tokens.long()] = small
        mapped = choose(TRITON, small, sampling, tokens=tokens, vocab_size=64, num_tokens=turn)
        plain = choose(TRITON, wide, sampling, num_tokens=turn)
        assert mapped.ids == plain.ids
        if sampling == "probabilistic":
            assert torch.equal(mapped.probs, plain.probs)
            outside = sorted(set(range(64)) - set(tokens.tolist()))
            assert (mapped.probs[:, outside] == 0).all()


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_rows_without_a_number_draft_the_lowest_id(sampling: DraftSampling) -> None:
    """Guards garbage rows of padding: whatever they hold, the id is one of the vocabulary."""
    check_rows_without_a_number(TRITON, sampling)


def test_ties_go_to_the_lowest_id() -> None:
    """Guards planted ties of a greedy draft, across chunks too."""
    logits = torch.zeros(1, 40)
    logits[0, [9, 21, 38]] = 4.0
    assert choose(TRITON, logits, "greedy").ids == [9]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_coupled_drafts_of_the_targets_logits_are_its_tokens(temperature: float) -> None:
    """Guards noise or scaling that is not the sampler's: a self-draft is always accepted."""
    logits = 2 * torch.randn(6, 90, generator=torch.Generator().manual_seed(3))
    row = RowSettings(temperature=temperature, seed=1 << 50, choice=1)
    block = Block(logits[None], [row], [[0] * 10], [[]], [[0] * 5])
    _, ids = block.run(TRITON)
    request = RequestSampling(temperature=temperature, seed=1 << 50, choice=1)
    for step in range(6):
        one = logits[step : step + 1]
        drafted = choose(TRITON, one, "coupled", requests=(request,), num_tokens=9 + step)
        assert drafted.ids == [ids[0, step].item()]  # at position 10 + step


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_choices_do_not_depend_on_company(sampling: DraftSampling) -> None:
    logits = 3 * torch.randn(4, 130, generator=torch.Generator().manual_seed(0))
    together = choose(TRITON, logits, sampling)
    for row in range(4):
        one = slice(row, row + 1)
        alone = choose(TRITON, logits[one], sampling, requests=REQUESTS[one])
        assert alone.ids[0] == together.ids[row]
        if sampling == "probabilistic":
            assert torch.equal(alone.probs[0], together.probs[row])
