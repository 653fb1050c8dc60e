"""process_logits and sample_rows: against the plain loops and the native kernels."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from graphengine.kernels.library import load
from graphengine.sampling.reference import RowSettings
from tests.graphengine.kernels.calls import Kernels
from tests.graphengine.kernels.test_sample import ROWS, Block, blocks, wide_block

pytest.importorskip("triton")

from graphengine.triton_kernels import chunks, search
from tests.graphengine.triton_kernels.launchers import Launchers

TRITON = Launchers()


def check_loops(block: Block) -> None:
    processed, ids = block.run(TRITON)
    want_processed, want_ids = block.expected()
    wanted = torch.tensor(want_processed).double()
    torch.testing.assert_close(processed.double(), wanted, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert ids.tolist() == want_ids


def single(logits: torch.Tensor, row: RowSettings, prompt: list[int] | None = None) -> Block:
    """One request of as many rows as there are of logits [rows, vocab], all drafts token 0."""
    return Block(logits[None], [row], [prompt or [0]], [[]], [[0] * (len(logits) - 1)])


def kept(logits: torch.Tensor, row: RowSettings) -> list[int]:
    """Tokens of logits [vocab] that the processors leave."""
    processed, _ = single(logits[None], row).run(TRITON)
    return (processed[0, 0] > -math.inf).nonzero().flatten().tolist()


@given(block=blocks())
@settings(
    max_examples=10,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_kernels_are_the_plain_loops(block: Block) -> None:
    """Every parameter on every row, drafts before it seen, extreme numbers and ties."""
    check_loops(block)


@pytest.mark.parametrize("size", [256, 4096])
def test_a_wide_vocabulary(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards chunks: of another size, skipped by the search, and the row's end inside one."""
    monkeypatch.setattr(chunks, "CHUNK", size)
    block = wide_block(2 if size == 4096 else 1)
    check_loops(block)
    processed, ids = block.run(TRITON)
    want_processed, want_ids = block.run(Kernels(load()))
    assert torch.equal(processed > -math.inf, want_processed > -math.inf)
    torch.testing.assert_close(processed, want_processed, rtol=0, atol=0)
    assert torch.equal(ids, want_ids)


@pytest.mark.parametrize("room", [1, 300])
def test_the_cut_does_not_depend_on_the_way_to_it(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards rows with too many tokens to gather, which are searched as a whole."""
    asked = [
        RowSettings(top_k=40),
        RowSettings(top_p=0.7, temperature=2.0),
        RowSettings(top_k=100, top_p=0.9, temperature=0.8),
    ]
    logits = (4 * torch.randn(3, 1, 500, generator=torch.Generator().manual_seed(5))).round()
    block = Block(logits, asked, [[0]] * 3, [[]] * 3, [[]] * 3)
    wanted, _ = block.run(TRITON)
    monkeypatch.setattr(search, "ROOM", room)
    monkeypatch.setattr(chunks, "CHUNK", 128)
    again, _ = block.run(TRITON)
    assert torch.equal(again.view(torch.int32), wanted.view(torch.int32))
    check_loops(block)


@pytest.mark.parametrize("query_len", [1, 2, 3])
def test_a_row_is_the_same_in_any_company(query_len: int) -> None:
    """Guards a request that reads its neighbour's row, whatever cell it is served in."""
    wide = wide_block(query_len)
    logits = wide.logits[..., :300].contiguous()
    rows = [*ROWS[:-1], RowSettings(allowed=range(0, 300, 7), logit_bias={7: 30.0, 8: 30.0})]
    few = [[token % 300 for token in tokens] for tokens in wide.prompts]
    drafts = [[token % 300 for token in tokens] for tokens in wide.drafts]
    processed, ids = Block(logits, rows, few, few, drafts).run(TRITON)
    for index in range(0, len(rows), 2):
        one = slice(index, index + 1)
        again, id_again = Block(logits[one], rows[one], few[one], few[one], drafts[one]).run(TRITON)
        assert torch.equal(again.view(torch.int32), processed[one].view(torch.int32))
        assert torch.equal(id_again, ids[one])
    first = Block(logits[:, :1], rows, few, few, [[] for _ in rows]).run(TRITON)
    assert torch.equal(first[0].view(torch.int32), processed[:, :1].view(torch.int32))


def test_rows_that_ask_for_nothing_keep_their_bits() -> None:
    """Guards a greedy row among sampled ones: NaN, infinities and zeros of either sign stay."""
    row = torch.tensor([math.nan, -0.0, math.inf, -math.inf, 1e-42, 3e38, -3e38, 0.0])
    greedy = RowSettings(temperature=0.0, top_k=2, top_p=0.1, min_p=0.9)
    processed, ids = single(row[None], greedy).run(TRITON)
    assert torch.equal(processed.view(-1).view(torch.int32), row.view(torch.int32))
    assert ids.tolist() == [[2]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("numbers", "chosen"),
    [
        ([math.nan] * 4, 0),
        ([-math.inf] * 4, 0),
        ([math.nan, math.nan, -math.inf, -math.inf], 2),
        ([math.nan, -math.inf, 5.0, math.nan], 2),
    ],
)
def test_rows_with_nothing_to_choose_from(
    numbers: list[float], chosen: int, temperature: float
) -> None:
    """Guards min-p and top-p of a row of NaN, and the token of one where everything is masked."""
    row = torch.tensor(numbers)
    asked = RowSettings(temperature=temperature, top_k=2, top_p=0.5, min_p=0.5)
    _, ids = single(row[None], asked).run(TRITON)
    assert ids.tolist() == [[chosen]]
    check_loops(single(row[None], asked))


@pytest.mark.parametrize("size", [16, 4096])
def test_ties_at_the_boundaries(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens like the last of top-k stay; of those like the last of top-p the lowest ids."""
    monkeypatch.setattr(chunks, "CHUNK", size)
    logits = torch.full((70,), -50.0)
    logits[[69, 2, 40, 17, 33, 50]] = torch.tensor([2.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    assert kept(logits, RowSettings(top_k=2)) == [2, 17, 33, 40, 69]
    flat = torch.full((70,), -math.inf)
    flat[[1, 16, 20, 37, 38, 66]] = 3.0
    assert kept(flat, RowSettings(top_p=0.5)) == [1, 16, 20]
    assert kept(flat, RowSettings(top_p=0.51)) == [1, 16, 20, 37]
    assert kept(flat, RowSettings(top_p=2.0**-30)) == [1]
    assert kept(flat, RowSettings(top_k=1, top_p=1 - 2.0**-24)) == [1, 16, 20, 37, 38, 66]
    assert kept(logits, RowSettings(top_k=5, top_p=0.7)) == [2, 17, 69]
    assert kept(logits, RowSettings(top_k=69)) == list(range(70))


def test_a_vocabulary_too_large_is_refused() -> None:
    """Guards weights that pass 63 bits without a word."""
    with pytest.raises(ValueError, match="vocabulary of 262145 tokens: the kernels take 1 to"):
        chunks.constants((1 << 18) + 1)
