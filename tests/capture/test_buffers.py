"""StaticBuffers: one address a name, views of every cell, garbage and fills."""

from typing import Any

import pytest
import torch

from capture.buffers import BufferSpec, StaticBuffers, garbage
from capture.config import CaptureConfig
from capture.shapes import ShapeKey, ShapeTable

SPECS = (
    BufferSpec(name="ids", shape=("T",), dtype=torch.int32, role="input", fill=-1),
    BufferSpec(name="table", shape=("R", 5), dtype=torch.int32, role="input"),
    BufferSpec(name="starts", shape=("R+1",), dtype=torch.int32, role="input"),
    BufferSpec(name="mask", shape=("T", 3), dtype=torch.bool, role="input", cells_only=True),
    BufferSpec(name="hidden", shape=("T", 4), dtype=torch.bfloat16, role="scratch"),
    BufferSpec(
        name="logits", shape=("T", 9), dtype=torch.float32, role="output", fill=0.5, cells_only=True
    ),
    BufferSpec(name="packed", shape=(6, 3), dtype=torch.int64, role="output", cells_only=True),
)


def sizes(max_num_reqs: int = 6, query_len: int = 7, prefill: int = 32) -> dict[str, int]:
    return {
        "max_num_reqs": max_num_reqs,
        "max_num_tokens": prefill,
        "max_cell_tokens": max_num_reqs * query_len,
    }


def make(device: str = "cpu", **changes: int) -> StaticBuffers:
    return StaticBuffers(SPECS, **{**sizes(), **changes}, device=torch.device(device))


# Case 16: 42, 132 and 4 rows; prefill larger and smaller than the largest cell.
@pytest.mark.parametrize(("max_num_seqs", "max_draft_tokens"), [(6, 6), (33, 3), (1, 3)])
@pytest.mark.parametrize("prefill", [8, 256])
def test_every_cell_of_a_table_fits(max_num_seqs: int, max_draft_tokens: int, prefill: int) -> None:
    """Guards case 16: a buffer below the padded size returned short slices."""
    table = ShapeTable.from_config(
        CaptureConfig(), max_num_seqs=max_num_seqs, max_draft_tokens=max_draft_tokens, tiers=("g",)
    )
    buffers = StaticBuffers(
        SPECS,
        **sizes(max_num_seqs, max_draft_tokens + 1, prefill),
        device=torch.device("cpu"),
    )
    for key in table:
        views = buffers.cell(key)
        assert views["ids"].shape == (key.num_tokens,)
        assert views["table"].shape == (key.num_reqs, 5)
        assert views["starts"].shape == (key.num_reqs + 1,)
        assert views["mask"].shape == (key.num_tokens, 3)
        assert views["logits"].shape == (key.num_tokens, 9)
        assert views["packed"].shape == (6, 3)


def test_all_views_of_a_name_share_one_address_and_are_contiguous() -> None:
    """Guards the contract that every captured cell sees a buffer at the same address."""
    buffers = make()
    addresses = buffers.addresses()
    for views in (
        buffers.cell(ShapeKey(6, 7, "g")),
        buffers.cell(ShapeKey(1, 1, "g")),
        buffers.prefill(num_reqs=3, num_tokens=32),
    ):
        for name, view in views.items():
            assert view.data_ptr() == addresses[name], name
            assert view.is_contiguous(), name
    small, large = buffers.cell(ShapeKey(1, 2, "g")), buffers.cell(ShapeKey(2, 2, "g"))
    small["hidden"].fill_(3)
    assert large["hidden"][:2].eq(3).all()
    assert not large["hidden"][2:].eq(3).any()
    assert buffers.whole("hidden").numel() == 42 * 4


def test_buffers_start_with_their_declared_fill() -> None:
    buffers = make()
    for name, spec in buffers.specs.items():
        assert buffers.whole(name).eq(spec.fill).all(), name


def test_a_prefill_has_no_buffers_of_cells_only() -> None:
    """Guards memory: logits sized by prefill tokens would be the largest buffer of all."""
    views = make(max_num_tokens=4096).prefill(num_reqs=2, num_tokens=4096)
    assert set(views) == {"ids", "table", "starts", "hidden"}
    assert make(max_num_tokens=4096).whole("logits").numel() == 42 * 9


@pytest.mark.parametrize(
    "view",
    [
        lambda buffers: buffers.cell(ShapeKey(7, 7, "g")),
        lambda buffers: buffers.cell(ShapeKey(6, 8, "g")),
        lambda buffers: buffers.prefill(num_reqs=2, num_tokens=43),
        lambda buffers: buffers.prefill(num_reqs=7, num_tokens=4),
    ],
)
def test_a_view_beyond_the_storage_is_refused(view: Any) -> None:
    """Guards against short slices that broadcast or fail far away."""
    with pytest.raises(AssertionError, match="larger than its static buffer"):
        view(make())


def test_on_the_meta_device_buffers_only_tell_their_size() -> None:
    """Guards the budget check, which asks before anything is allocated."""
    for changes in ({}, {"max_num_tokens": 999}, {"max_num_reqs": 9, "max_cell_tokens": 63}):
        assert make(device="meta", **changes).num_bytes == make(**changes).num_bytes
    assert make(device="meta", max_num_tokens=1 << 50).num_bytes > 1 << 50


def test_poison_and_clear_touch_their_roles_alone() -> None:
    buffers = make()
    buffers.poison(("scratch", "output"))
    assert buffers.whole("hidden").isnan().all()
    assert buffers.whole("logits").isnan().all()
    assert buffers.whole("packed").eq(torch.iinfo(torch.int64).min).all()
    assert buffers.whole("ids").eq(-1).all()
    buffers.poison(("input",), largest=True)
    assert buffers.whole("ids").eq(torch.iinfo(torch.int32).max).all()
    assert buffers.whole("mask").all()
    assert buffers.whole("hidden").isnan().all()
    buffers.clear(("input", "output"))
    assert buffers.whole("ids").eq(-1).all()
    assert buffers.whole("logits").eq(0.5).all()
    assert buffers.whole("hidden").isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.uint8])
def test_garbage_has_two_values_of_every_dtype(dtype: torch.dtype) -> None:
    values = torch.tensor([garbage(dtype), garbage(dtype, largest=True)], dtype=dtype)
    assert values[0] != values[1]


def test_a_snapshot_is_a_copy_that_restores_in_place() -> None:
    """Guards lazy capture, which must give the triggering batch its inputs back."""
    buffers = make()
    addresses = buffers.addresses()
    buffers.whole("ids").copy_(torch.arange(42))
    snapshot = buffers.snapshot(("input",))
    assert set(snapshot) == {"ids", "table", "starts", "mask"}
    buffers.poison(("input", "scratch"))
    buffers.restore(snapshot)
    assert buffers.whole("ids").tolist() == list(range(42))
    assert buffers.whole("hidden").isnan().all()
    assert buffers.addresses() == addresses


def test_a_name_is_declared_once() -> None:
    with pytest.raises(AssertionError, match="ids declared twice"):
        StaticBuffers((SPECS[0], SPECS[0]), **sizes(), device=torch.device("cpu"))


def test_release_drops_the_storages() -> None:
    buffers = make()
    buffers.release()
    assert buffers.num_bytes == 0
    assert not buffers.addresses()
