"""Rows that are moved, interpreted: every number in its place, and none anywhere else."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from graphengine.triton_kernels import rows
from tests.graphengine.kernels.calls import empty

DTYPES = (torch.float32, torch.float16)
WIDTHS = (1, 5, 64, 70)  # with programs of 64 columns: one, one, exactly one, two
NAN = float("nan")


@pytest.fixture(autouse=True)
def _smaller_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "COLUMNS", 64)


@pytest.mark.parametrize("take", [rows.embed, rows.take_rows, rows.load_slots])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_of_a_table_are_widened_exactly(
    take: Callable[[Tensor, Tensor, Tensor], None], dtype: torch.dtype, width: int
) -> None:
    """A wrong row, a lossy widening, or a write behind the last row."""
    table = torch.randn(9, width).to(dtype)
    table[4, 0] = NAN
    index = torch.tensor([8, 0, 4, 4, 7], dtype=torch.int32)
    behind = empty(6, width)
    take(behind[:5], table, index)
    assert torch.equal(behind[:5].nan_to_num(7.0), table[index.long()].float().nan_to_num(7.0))
    assert behind[5].isnan().all()


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_at_position_0_are_zeroed(width: int) -> None:
    """A row at another position, and a row that is no number."""
    x = torch.randn(4, width)
    x[2] = NAN
    out = x.clone()
    rows.zero_first(out, torch.tensor([3, 0, 0, 1], dtype=torch.int32))
    assert torch.equal(out[[0, 3]], x[[0, 3]])
    assert not out[1:3].any()


@pytest.mark.parametrize(("first", "second"), [(5, 3), (64, 64), (1, 70), (70, 1)])
def test_rows_side_by_side(first: int, second: int) -> None:
    """The seam within a program and between two; NaN of one side in the other."""
    x, y = torch.randn(3, first), torch.randn(3, second)
    x[1] = NAN
    out = torch.full((3, first + second), 9.0)
    rows.concat_rows(out, x, y)
    assert torch.equal(out.nan_to_num(7.0), torch.cat([x, y], dim=1).nan_to_num(7.0))


def shifted(token_ids: list[int], width: int, last: list[int], newest: list[int]) -> list[int]:
    out = []
    for request, (end, new) in enumerate(zip(last, newest, strict=True)):
        for row in range(request * width, (request + 1) * width):
            out.append(token_ids[row + 1] if row < end else new if row == end else 0)
    return out


@pytest.mark.parametrize("width", [1, 4, 16, 37])
@pytest.mark.parametrize("in_place", [False, True])
def test_tokens_are_shifted_request_by_request(width: int, in_place: bool) -> None:
    """A neighbour's token, one that was replaced before it was read, a live row in the tail."""
    behind = torch.arange(1, 3 * width + 2, dtype=torch.int32)
    tokens = behind[:-1]
    last = torch.tensor([width - 1, width, 2 * width + width // 2], dtype=torch.int32)
    newest = torch.tensor([-7, -8, -9], dtype=torch.int32)
    wanted = shifted(tokens.tolist(), width, last.tolist(), newest.tolist())
    out = behind if in_place else empty(3 * width + 1, dtype=torch.int32)
    unwritten = int(out[-1])
    rows.shift_tokens(out[:-1], tokens, last, newest)
    assert out.tolist() == [*wanted, unwritten]


@pytest.mark.parametrize("dtype", DTYPES)
def test_hidden_states_are_kept_by_slot(dtype: torch.dtype) -> None:
    """Columns of several taps, rounding, and the null block, where padding would write."""
    width = 70
    storage = torch.zeros(12, 2 * width, dtype=dtype)
    slots = torch.tensor([4, 11, 3, 0], dtype=torch.int32)
    taps = torch.randn(2, 4, width)
    taps[:, 3] = NAN
    for tap, x in enumerate(taps):
        rows.store_slots(storage, x, slots, tap * width, 4)
    expected = torch.zeros_like(storage)
    expected[[4, 11]] = torch.cat([*taps], dim=1)[:2].to(dtype)
    assert torch.equal(storage, expected)
    out = empty(4, 2 * width)
    rows.load_slots(out, storage, slots)
    assert torch.equal(out, expected[slots.long()].float())
