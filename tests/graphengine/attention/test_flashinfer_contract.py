"""FlashInfer's own surface: what the installed 0.7.4 takes, and what its planner is handed."""

import inspect
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import flashinfer
import pytest
import torch

from graphengine.attention.base import AttentionShape
from graphengine.attention.flashinfer import check_supported
from graphengine.attention.flashinfer_plan import VERSION, capacity, load, q_tile
from tests.graphengine.attention.flashinfer_double import (
    SHAPE,
    SIZES,
    NativeDouble,
    Rows,
    make_attention,
    make_rows,
    planner_parameters,
)

Wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
GROUP = SHAPE.num_heads // SHAPE.num_kv_heads


def uniform(num_reqs: int, query_len: int, past: int = 5) -> Rows:
    return make_rows([(past + index, query_len) for index in range(num_reqs)])


def test_the_pinned_version_is_installed() -> None:
    """Guards against a recipe that was read from another version than the one in use."""
    pins = Path(__file__).parents[3] / "constraints.txt"
    assert flashinfer.__version__ == VERSION
    assert f"flashinfer-python=={VERSION}\n" in pins.read_text()
    assert load() is flashinfer


def test_a_missing_or_other_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an import error from the middle of a start, or a silent other planner."""
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(__version__="0.6.1"))
    with pytest.raises(ValueError, match=r"0\.6\.1 is installed, only 0\.7\.4 .*make setup-cuda"):
        load()
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ValueError, match=r"not installed .*make setup-cuda"):
        load()


@pytest.mark.parametrize(
    ("function", "positional", "keywords"),
    [
        (
            Wrapper.__init__,
            "self float_workspace_buffer kv_layout",
            "use_cuda_graph qo_indptr_buf paged_kv_indptr_buf paged_kv_indices_buf "
            "paged_kv_last_page_len_buf backend max_total_num_rows",
        ),
        (
            Wrapper.reset_workspace_buffer,
            "self float_workspace_buffer int_workspace_buffer",
            "",
        ),
        (
            Wrapper.plan,
            "self qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads "
            "num_kv_heads head_dim_qk page_size",
            "causal sm_scale q_data_type kv_data_type o_data_type disable_split_kv",
        ),
        (Wrapper.run, "self q paged_kv_cache", "out enable_pdl"),
    ],
)
def test_signatures(function: object, positional: str, keywords: str) -> None:
    """Guards against an argument that a new version has moved or renamed."""
    parameters = inspect.signature(function).parameters  # type: ignore[arg-type]
    names = list(parameters)
    assert names[: len(positional.split())] == positional.split()
    assert set(keywords.split()) <= set(names)


def test_defaults_that_are_relied_on() -> None:
    """What is not passed must go on meaning nothing: no hint, no window, copies without a wait."""
    parameters = inspect.signature(Wrapper.plan).parameters
    expected = {
        "custom_mask": None,
        "packed_custom_mask": None,
        "pos_encoding_mode": "NONE",
        "window_left": -1,
        "logits_soft_cap": None,
        "non_blocking": True,
        "fixed_split_size": None,
        "uniform_q_len": None,
        "head_dim_vo": None,
    }
    assert {name: parameters[name].default for name in expected} == expected


def test_the_planner_has_the_parameters_that_the_double_names() -> None:
    """Guards against a double that reads the right numbers under the wrong names."""
    expected = (
        "float_workspace_buffer int_workspace_buffer page_locked_int_workspace_buffer qo_indptr",
        "kv_indptr kv_len_arr total_num_rows batch_size num_qo_heads num_kv_heads page_size",
        "enable_cuda_graph head_dim_qk head_dim_vo causal window_left fixed_split_size",
        "disable_split_kv num_colocated_ctas uniform_q_len fixed_uniform_q_len",
    )
    assert " ".join(planner_parameters()) == " ".join(expected)


def test_the_plan_has_the_places_that_are_checked() -> None:
    """Guards against a check that looks for the q tile and split-KV at other places."""
    header = Path(flashinfer.__file__).parent / "data/include/flashinfer/attention/scheduler.cuh"
    found = re.search(
        r"struct PrefillPlanInfo \{.*?return \{(.*?)\}", header.read_text(), re.DOTALL
    )
    assert found
    names = [name.strip() for name in found[1].split(",")]
    assert (len(names), names[3], names[14]) == (15, "cta_tile_q", "split_kv")


@pytest.mark.parametrize(("num_reqs", "query_len"), sorted(SIZES.cells))
def test_planner_arguments_of_every_cell(
    native: NativeDouble, num_reqs: int, query_len: int
) -> None:
    """All that the launch is made from, but for lengths: the same in every plan of a cell."""
    attention = make_attention(torch.bfloat16)
    for past in (0, 5, 17):
        rows = uniform(num_reqs, query_len, past)
        attention.plan(rows.batch, rows.host)
    assert native.modules == 3 * [
        ("fa2", *3 * [torch.bfloat16], torch.int32, 64, 64, 0, *4 * [False])
    ]
    expected = {
        "total_num_rows": capacity(num_reqs, num_reqs * query_len, GROUP),
        "batch_size": num_reqs,
        "num_qo_heads": 6,
        "num_kv_heads": 2,
        "page_size": 4,
        "enable_cuda_graph": True,
        "head_dim_qk": 64,
        "head_dim_vo": 64,
        "causal": True,
        "window_left": -1,
        "fixed_split_size": -1,
        "disable_split_kv": True,
        "num_colocated_ctas": 0,
        "uniform_q_len": 0,
        "fixed_uniform_q_len": False,
    }
    for past, call in zip((0, 5, 17), native.plans, strict=True):
        assert {name: call[name] for name in expected} == expected
        assert call["qo_indptr"].tolist() == [query_len * at for at in range(num_reqs + 1)]
        lens = [past + index + query_len for index in range(num_reqs)]
        assert call["kv_len_arr"].tolist() == lens
        assert call["kv_indptr"].diff().tolist() == [-(-length // 4) for length in lens]
        for name in ("qo_indptr", "kv_indptr", "kv_len_arr"):
            assert call[name].dtype == torch.int32
    buffers = ("float_workspace_buffer", "int_workspace_buffer")
    addresses = {name: {call[name].data_ptr() for call in native.plans} for name in buffers}
    assert all(len(found) == 1 for found in addresses.values()), "a workspace moved"


def test_workspaces(native: NativeDouble) -> None:
    """The float workspace is one for all; a schedule stays while another wrapper is planned."""
    attention = make_attention()
    for num_reqs in (1, 2, 4):
        rows = uniform(num_reqs, 2)
        attention.plan(rows.batch, rows.host)
    other = make_attention(workspace=attention.workspace)
    other.plan(rows.batch, rows.host)
    floats = {call["float_workspace_buffer"].data_ptr() for call in native.plans}
    ints = {call["int_workspace_buffer"].data_ptr() for call in native.plans}
    assert (len(floats), len(ints)) == (1, 4)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 16, 64, 65])
def test_capacity_gives_the_largest_tile_at_every_shape(group: int) -> None:
    """Guards against rows whose bits change with the size of the batch or the number of drafts.

    The planner takes its largest tile above 64 packed rows of the longest request it allows for.
    """
    for num_reqs in (1, 2, 3, 8, 16, 64, 256):
        for query_len in (1, 2, 7, 8):
            rows = capacity(num_reqs, num_reqs * query_len, group)
            assert rows >= num_reqs * query_len
            assert (rows - num_reqs + 1) * group > 64
    assert q_tile(64) == q_tile(128) == 128
    assert q_tile(256) == 64


def shape(**changes: int) -> AttentionShape:
    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "block_size": 16}
    sizes["sliding_window"] = None  # type: ignore[assignment]
    return AttentionShape(**{**sizes, **changes})


@pytest.mark.parametrize(
    ("dtype", "changes", "message"),
    [
        (torch.float32, {}, "dtype=torch.float32: FlashInfer attention serves bfloat16, float16"),
        (torch.bfloat16, {"head_dim": 80}, "head_dim=80: .* serves 64, 128, 256"),
        (torch.bfloat16, {"num_heads": 9}, "num_heads=9, num_kv_heads=2: .* multiples"),
        (torch.bfloat16, {"sliding_window": 16}, "sliding_window=16: .* None alone"),
        (torch.float16, {}, "device=cpu: FlashInfer attention needs a CUDA device"),
    ],
)
def test_what_it_cannot_do_is_refused(
    dtype: torch.dtype, changes: dict[str, int], message: str
) -> None:
    """Guards against kernels that are built for minutes and then fail, or that vary by batch."""
    with pytest.raises(ValueError, match=message):
        check_supported(dtype, shape(**changes), torch.device("cpu"))


def test_old_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against bf16 kernels on a device that has no instructions for them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ValueError, match=r"compute capability \(7, 5\)"):
        check_supported(torch.bfloat16, shape(), torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_supported(torch.bfloat16, shape(), torch.device("cuda"))


def test_more_than_was_prepared_for_is_an_error(native: NativeDouble) -> None:
    """Guards against prefill that grows buffers, which graphs have captured, while serving."""
    attention = make_attention()
    for rows in (make_rows([(0, 65)], width=32), make_rows(9 * [(0, 2)])):
        with pytest.raises(AssertionError, match="prepared for 8 of 64"):
            attention.plan(rows.batch, rows.host)
