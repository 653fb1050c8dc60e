"""Checkpoints on disk: names, shapes, dtypes and configs of the public formats."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from proposers.training import DraftConfig, Eagle3Flags, LayerSizes
from proposers.training.draft_config import default_taps
from proposers.training.job import make_draft
from tests.proposers.training.conftest import SIZES, VOCAB_SIZE, Taught, make_batch, make_target
from tests.proposers.training.test_trainer import QUICK, make_job

Teach = Callable[[tuple[int, ...]], Taught]
H, INNER, Q, KV, V = 64, 96, 64, 32, 264  # the tiny target's sizes

MLP = {"mlp.gate_proj": [INNER, H], "mlp.up_proj": [INNER, H], "mlp.down_proj": [H, INNER]}


def attention(columns: int) -> dict[str, list[int]]:
    rows = {"q_proj": Q, "k_proj": KV, "v_proj": KV}
    found = {f"self_attn.{name}": [size, columns] for name, size in rows.items()}
    return {**found, "self_attn.o_proj": [H, Q], "post_attention_layernorm": [H]}


def named(prefix: str, shapes: dict[str, list[int]]) -> dict[str, list[int]]:
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


def norms(*names: str) -> dict[str, list[int]]:
    return {name: [H] for name in names}


EAGLE3 = {
    **named("", {"fc": [H, 3 * H], "norm": [H], "lm_head": [50, H]}),
    **named("layers.0.", {**attention(2 * H), **MLP, **norms("input_layernorm", "hidden_norm")}),
    "d2t": [50],
    "t2d": [V],
}
EAGLE1 = {
    **named("", {"embed_tokens": [V, H], "fc": [H, 2 * H]}),
    **named("layers.0.", {**attention(H), **MLP}),
}
_MTP_NORMS = norms("token_layernorm", "hidden_layernorm", "input_layernorm", "final_layernorm")
MTP = named("model.mtp_layers.0.", {**attention(H), **MLP, **_MTP_NORMS, "input_proj": [H, 2 * H]})


def run(teach: Teach, folder: Path, draft: DraftConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config and tensors that a short run leaves."""
    job = make_job(teach(draft.taps or ()), folder, draft, replace(QUICK, steps=1))
    job.run()
    config = json.loads((job.out / "config.json").read_text(encoding="utf-8"))
    return config, load_file(job.out / "model.safetensors")


@pytest.mark.parametrize("fc_norm", [False, True])
def test_eagle3(tmp_path: Path, teach: Teach, fc_norm: bool) -> None:
    """Guards a name, a shape or a flag that its readers look for elsewhere."""
    flags = Eagle3Flags(fc_norm=fc_norm, norm_output=True)
    draft = DraftConfig(kind="eagle3", taps=(0, 1, 2), draft_vocab=50, flags=flags)
    config, tensors = run(teach, tmp_path, draft)
    expected = dict(EAGLE3)
    if fc_norm:
        expected |= named("", norms("fc_norm.0", "fc_norm.1", "fc_norm.2"))
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == expected
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert {t.dtype for t in tensors.values() if t.is_floating_point()} == {torch.bfloat16}
    ids = torch.arange(50) + tensors["d2t"]
    assert tensors["t2d"].nonzero().flatten().tolist() == ids.tolist()
    assert 259 in ids  # the end of a text
    assert config["speculators_model_type"] == "eagle3"
    assert config["draft_vocab_size"] == 50
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert config["target_hidden_size"] == H
    wanted = {"fc_norm": fc_norm, "norm_before_residual": True, "norm_output": True}
    assert {name: config[name] for name in wanted} == wanted
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["num_hidden_layers"], layer["hidden_size"]) == (
        "llama",
        1,
        H,
    )
    assert (layer["vocab_size"], layer["rope_theta"]) == (V, 10000.0)
    [proposal] = config["speculators_config"]["proposal_methods"]
    assert proposal["speculative_tokens"] == QUICK.unroll
    assert config["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]


def test_eagle3_without_a_draft_vocabulary_can_draft_all(tmp_path: Path, teach: Teach) -> None:
    """Guards a format whose tables are missing where they say nothing new."""
    config, tensors = run(teach, tmp_path, DraftConfig(kind="eagle3", taps=(0, 1, 2)))
    assert config["draft_vocab_size"] == V
    assert not tensors["d2t"].any()
    assert tensors["t2d"].all()


def test_eagle1(tmp_path: Path, teach: Teach) -> None:
    """Guards norms that the format does not have, and a bias that readers expect by default."""
    config, tensors = run(teach, tmp_path, DraftConfig(kind="eagle1"))
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == EAGLE1
    assert config["bias"] is False
    assert config["num_hidden_layers"] == 1


def test_mtp(tmp_path: Path, teach: Teach) -> None:
    """Guards names of another family of MTP checkpoints."""
    config, tensors = run(teach, tmp_path, DraftConfig(kind="mtp"))
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == MTP
    assert config["num_nextn_predict_layers"] == 1
    assert (config["model_type"], config["num_hidden_layers"]) == ("mimo", 2)


def test_a_draft_model_is_what_transformers_reads(tmp_path: Path, teach: Teach) -> None:
    """Guards a decoder that computes something else than its checkpoint says."""
    draft = DraftConfig(kind="draft_model", layers=2, hidden=32, dtype="float32")
    taught = teach(())
    job = make_job(taught, tmp_path, draft)
    job.run()
    torch.manual_seed(QUICK.seed)
    ours = make_draft(draft, taught.target, None)
    stored = load_file(job.out / "model.safetensors")
    ours.load_state_dict({name.removeprefix("model."): value for name, value in stored.items()})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(job.out)
    assert isinstance(theirs, transformers.LlamaForCausalLM)
    batch = make_batch([20])
    with torch.no_grad():
        [rows] = ours.unroll(batch, 1)
        expected = theirs(batch.token_ids).logits
    torch.testing.assert_close(ours.logits(rows), expected, rtol=1e-4, atol=1e-4)


def test_sizes_of_a_draft_model_follow_its_width() -> None:
    """Guards heads that do not divide."""
    target = replace(SIZES, num_heads=9, num_kv_heads=3, hidden_size=72)
    for hidden, heads, kv_heads in ((24, 3, 3), (32, 4, 2), (40, 5, 1), (72, 9, 3)):
        config = DraftConfig(kind="draft_model", hidden=hidden)
        sizes: LayerSizes = config.sizes(target)
        assert (sizes.num_heads, sizes.num_kv_heads) == (heads, kv_heads)
        assert sizes.intermediate_size == 3 * hidden
    assert DraftConfig(kind="eagle3", kv_heads=9).sizes(target).num_kv_heads == 9
    with pytest.raises(ValueError, match="kv_heads=2: expected a divisor of the 9 query heads"):
        DraftConfig(kind="eagle3", kv_heads=2).sizes(target)
    with pytest.raises(ValueError, match="hidden=20: expected a multiple"):
        DraftConfig(kind="draft_model", hidden=20).sizes(target)


def test_default_taps() -> None:
    """Guards EAGLE-3's own choice, and what has too few layers for it."""
    assert default_taps(30) == (2, 15, 27)
    assert default_taps(32) == (2, 16, 29)
    assert default_taps(4) == (1, 2, 3)
    for layers in range(1, 12):
        assert all(0 <= tap <= layers for tap in default_taps(layers))


@pytest.mark.parametrize("taps", [(3,), (-1, 1), (), (2, 1, 0), (1, 1)])
def test_taps_that_no_reader_takes_are_refused(taps: tuple[int, ...]) -> None:
    """Guards a head of hours that `eagle` refuses: its layers must be there, and ascend."""
    config = DraftConfig(kind="eagle3", taps=taps)
    message = rf"taps={re.escape(str(list(taps)))}: expected layers from 0 to 2, in ascending order"
    with pytest.raises(ValueError, match=message):
        config.resolved_taps(2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "medusa"}, "kind='medusa': expected one of eagle3, eagle1, mtp, draft_model"),
        ({"kind": "mtp", "draft_vocab": 5}, "draft_vocab=5: only kind eagle3 has it"),
        ({"kind": "eagle3", "hidden": 5}, "hidden=5: only kind draft_model has it"),
        ({"kind": "eagle1", "flags": Eagle3Flags(fc_norm=True)}, "fc_norm=True: only kind eagle3"),
        (
            {"kind": "mtp", "flags": Eagle3Flags(norm_before_residual=False)},
            "norm_before_residual=False: only kind eagle3",
        ),
        ({"kind": "draft_model", "layers": 0}, "layers=0"),
        ({"kind": "eagle3", "dtype": "float16"}, "dtype='float16'"),
    ],
)
def test_kinds_refuse_what_is_not_theirs(values: dict[str, Any], message: str) -> None:
    """Guards a flag that is ignored."""
    with pytest.raises(ValueError, match=message):
        DraftConfig(**values)


def test_a_head_over_its_own_vocabulary_starts_from_the_targets_rows() -> None:
    """Guards thousands of steps in which a head learns what the target knows."""
    target = make_target()
    ids = torch.tensor([2, 5, VOCAB_SIZE - 1])
    draft = make_draft(DraftConfig(kind="eagle3", taps=(0, 1, 2)), target, ids)
    state = draft.state_dict()
    assert torch.equal(state["lm_head.weight"], target.lm_head[ids])
    assert torch.equal(state["norm.weight"], target.final_norm)
