"""Weights of EAGLE heads: the table of draft ids (case 36) and the names of the layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from proposers.checkpoint import INDEX_FILE, PICKLED_FILE, DraftCheckpoint
from proposers.eagle_weights import canonical_names, draft_tokens
from tests.draft_heads import write

V, DRAFT_V = 64, 16
IDS = torch.tensor([5, 3, 40, 63, 0, 17, 18, 19, 2, 50, 49, 33, 8, 21, 60, 11])  # in no order
OFFSETS = IDS - torch.arange(DRAFT_V)
MARKS = torch.zeros(V, dtype=torch.bool).index_fill(0, IDS, True)


def read(path: Path, num_columns: int = DRAFT_V, **tensors: torch.Tensor) -> torch.Tensor | None:
    write(path, {}, {"fc.weight": torch.zeros(2), **tensors})
    checkpoint = DraftCheckpoint.open(path)
    names = canonical_names(checkpoint)
    return draft_tokens(checkpoint, names, num_columns=num_columns, vocab_size=V)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_all_ids_are_mapped(dtype: torch.dtype, tmp_path: Path) -> None:
    found = read(tmp_path, d2t=OFFSETS.to(dtype), t2d=MARKS)
    assert found is not None
    assert found.dtype == torch.int32
    assert found.tolist() == IDS.tolist()
    assert read(tmp_path, d2t=OFFSETS.to(dtype)) is not None, "t2d may be absent"


def test_a_whole_vocabulary_needs_no_table(tmp_path: Path) -> None:
    assert read(tmp_path, V) is None
    assert read(tmp_path, V, d2t=torch.zeros(V, dtype=torch.int64)) is None


FAULTS: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "missing": ({}, "has no d2t, but draft_vocab_size=16 is not the target's vocabulary of 64"),
    "other length": ({"d2t": OFFSETS[1:]}, r"d2t is torch.int64 \[15\]; expected integers \[16\]"),
    "not integers": ({"d2t": OFFSETS.float()}, "d2t is torch.float32"),
    "absolute ids": ({"d2t": IDS}, r"draft 3 to 66, outside .*0\.\.63; d2t looks like absolute id"),
    "absolute ids inside": (
        {"d2t": torch.tensor([*range(14, -1, -1), 15])},
        "15 drafts to id 14; d2t looks like absolute ids: expected offsets",
    ),
    "negative": ({"d2t": OFFSETS - 6}, r"draft 0 to -1, outside the target's ids 0\.\.63$"),
    "beyond": ({"d2t": OFFSETS + 1}, r"draft 3 to 64, outside the target's ids"),
    "twice": ({"d2t": OFFSETS.index_fill(0, torch.tensor([1]), 4)}, "2 drafts to id 5"),
    "never filled": ({"d2t": OFFSETS * 0, "t2d": MARKS}, "d2t and t2d disagree"),
    "marks of another": ({"d2t": OFFSETS, "t2d": MARKS.roll(1)}, "d2t and t2d disagree"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_the_table(name: str, tmp_path: Path) -> None:
    """Guards drafts of other tokens than the head means, which nothing but acceptance shows."""
    tensors, message = FAULTS[name]
    with pytest.raises(ValueError, match=message):
        read(tmp_path, **tensors)


@pytest.mark.parametrize(
    ("stored", "canonical"),
    [
        ("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"),
        ("model.layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("model.midlayer.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("model.fc_norm.0.weight", "fc_norm.0.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_layouts(stored: str, canonical: str, tmp_path: Path) -> None:
    write(tmp_path, {}, {stored: torch.zeros(1)})
    assert canonical_names(DraftCheckpoint.open(tmp_path)) == {canonical: stored}


def test_one_name_for_two_tensors(tmp_path: Path) -> None:
    write(tmp_path, {}, {"fc.weight": torch.zeros(1), "model.fc.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"holds both (model\.)?fc.weight and (model\.)?fc.weight"):
        canonical_names(DraftCheckpoint.open(tmp_path))


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.int64, "I64")]
)
def test_numbers_that_a_copy_would_cast(dtype: torch.dtype, name: str, tmp_path: Path) -> None:
    """Guards case 40: quantised numbers whose scales lie in no tensor."""
    write(tmp_path, {}, {"fc.weight": torch.zeros(2, 2).to(dtype)})
    checkpoint = DraftCheckpoint.open(tmp_path)
    with pytest.raises(ValueError, match=f"fc.weight is stored as {name}; allowed are F32, BF16"):
        checkpoint.check({"fc.weight": torch.empty(2, 2)})


@pytest.mark.parametrize("tensor", [torch.eye(2).to_sparse(), torch.empty(2, device="meta")])
def test_pickled_tensors_that_hold_no_numbers(tensor: torch.Tensor, tmp_path: Path) -> None:
    """Guards a traceback after the target's weights have been read."""
    torch.save({"fc.weight": tensor}, tmp_path / PICKLED_FILE)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"fc.weight is torch\..* on .*: not numbers"):
        DraftCheckpoint.open(tmp_path)


def test_a_pickle_that_is_none(tmp_path: Path) -> None:
    (tmp_path / PICKLED_FILE).write_bytes(b"")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=f"{PICKLED_FILE} is not a file of tensors alone"):
        DraftCheckpoint.open(tmp_path)


def test_one_tensor_in_two_shards(tmp_path: Path) -> None:
    """Guards weights that depend on which file is read last."""
    shards = [f"model-{index}.safetensors" for index in range(2)]
    for shard in shards:
        save_file({"fc.weight": torch.zeros(2)}, tmp_path / shard)
    index = {"weight_map": {"fc.weight": shards[0], "norm.weight": shards[1]}}
    (tmp_path / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"tensor fc.weight is in another shard too"):
        DraftCheckpoint.open(tmp_path)


@pytest.mark.parametrize("name", ["fc.weight_scale", "layers.0.mlp.up_proj.qweight", "k_scale"])
def test_quantised_heads(name: str, tmp_path: Path) -> None:
    """Guards case 40: scales that nobody multiplies by."""
    write(tmp_path, {}, {name: torch.zeros(1)})
    with pytest.raises(ValueError, match=f"holds {name}: quantised heads are not supported"):
        canonical_names(DraftCheckpoint.open(tmp_path))
