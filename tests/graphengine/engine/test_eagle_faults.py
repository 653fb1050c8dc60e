"""Heads that do not fit are refused before weights are read, by name (cases 36, 39, 41, 56)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from graphengine import startup
from graphengine.memory import plan_memory
from graphengine.sampling.params import SamplingParams
from tests.draft_heads import Head, make_eagle1, make_eagle3, write
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Setup
from tests.tiny import VOCAB_SIZE, make_checkpoint

SETUP = Setup(k=3, num_blocks=20)
Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


def start(target: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start an engine that must be refused; reading a weight fails the test."""

    def no_weights(*given: Any, **named: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(startup, "load_weights", no_weights)
    SETUP.start(target, method="eagle", model=str(head))


def settings(**more: Any) -> Change:
    return lambda config, tensors: config.update(more)


def without(name: str) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]

    return change


def with_tensor(name: str, *shape: int) -> Change:
    return lambda config, tensors: tensors.update({name: torch.zeros(shape)})


def both(first: Change, second: Change) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        first(config, tensors)
        second(config, tensors)

    return change


FAULTS: dict[str, tuple[Change, str]] = {
    "hidden size": (
        settings(hidden_size=128),
        "hidden_size=128, but the target's hidden_size is 64: .* of another",
    ),
    "target's hidden size": (
        settings(target_hidden_size=2048),
        "target_hidden_size=2048, but the target's hidden_size is 64",
    ),
    "borrowed embedding": (
        settings(hidden_size=128, target_hidden_size=64),
        "hidden_size=128 is not the target's 64, so it cannot do without its own embed_tokens",
    ),
    "vocabulary": (settings(vocab_size=300), "vocab_size=300 is more than the target's .* of 264"),
    "draft vocabulary": (settings(draft_vocab_size=300), "draft_vocab_size=300 is more than the"),
    "no table": (settings(draft_vocab_size=100), "has no d2t, but draft_vocab_size=100"),
    "no head": (
        both(settings(draft_vocab_size=100), without("lm_head.weight")),
        "draft_vocab_size=100, but the weights have no lm_head.weight, and the target's has 264",
    ),
    "embedding": (
        both(settings(vocab_size=262), with_tensor("embed_tokens.weight", 262, 64)),
        "vocab_size=262, and so the head's embed_tokens.weight lacks rows .* up to 263",
    ),
    "layer ids": (
        settings(eagle_aux_hidden_state_layer_ids=[0, 1, 3]),
        r"\[0, 1, 3\] is not supported; allowed: ids of states after 0 to 2 layers",
    ),
    "number of layer ids": (
        settings(eagle_aux_hidden_state_layer_ids=[0, 1]),
        r"fc.weight has shape \[64, 192\], its config and the target imply \[64, 128\]",
    ),
    "projection": (without("fc.weight"), "lacks 1 parameters: fc.weight"),
    "norm": (settings(norm_before_fc=True), "lacks 1 parameters: input_norm.weight"),
    "a layer's parameter": (
        without("layers.0.mlp.up_proj.weight"),
        "lacks 1 parameters: layers.0.mlp.up_proj.weight",
    ),
    "a layer's shape": (
        with_tensor("layers.0.mlp.up_proj.weight", 3, 3),
        r"up_proj.weight has shape \[3, 3\]",
    ),
    "one too many": (
        with_tensor("layers.0.extra.weight", 3),
        "holds 1 tensors that its architecture has no place for: layers.0.extra.weight",
    ),
    "a norm too many": (
        with_tensor("fc_norm.0.weight", 64),
        "holds 1 tensors that its architecture has no place for: fc_norm.0.weight",
    ),
    "kind": (settings(medusa_num_heads=3), "medusa_num_heads=3 is of another kind of head, Medusa"),
    "layers": (settings(rope_scaling={"type": "dynamic"}), "rope kind 'dynamic' is not supported"),
    "family": (settings(architectures=None, model_type="phi"), "model_type 'phi' is not supported"),
    "head size": (settings(head_dim=512), "head_dim=512: the attention kernels serve up to"),
    "mlp bias": (settings(mlp_bias=True), "mlp_bias=True: MLP biases are not supported"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_headers_tell(
    name: str, checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, message = FAULTS[name]
    head = Head()
    config, tensors = head.config, make_eagle3(tmp_path / "right", head)
    change(config, tensors)
    write(tmp_path / "wrong", config, tensors)
    with pytest.raises(ValueError, match=f"SpeculativeConfig.model=.*wrong.*: .*{message}"):
        start(checkpoints.get(), tmp_path / "wrong", monkeypatch)


def test_what_is_no_head(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"SpeculativeConfig.model=.*nowhere.* is no directory"):
        start(checkpoints.get(), tmp_path / "nowhere", monkeypatch)
    # A whole model has no projection: it is a draft model, if anything.
    with pytest.raises(ValueError, match=r"lacks 2 parameters: fc.bias, fc.weight"):
        start(checkpoints.get(), checkpoints.get(), monkeypatch)
    other = make_checkpoint(tmp_path / "gguf")
    (other / "config.json").write_text(json.dumps({"architectures": ["Phi3ForCausalLM"]}))
    with pytest.raises(ValueError, match=r"architectures=\['Phi3ForCausalLM'\] is not supported"):
        start(checkpoints.get(), other, monkeypatch)


def test_left_overs_of_training_are_passed_over(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Guards heads whose file also holds the verifier's norm, or a buffer of the rotation."""
    names = ("verifier_norm.weight", "layers.0.self_attn.rotary_emb.inv_freq")
    make_eagle3(tmp_path, Head(), **{name: torch.zeros(8) for name in names})
    SETUP.start(checkpoints.get(), method="eagle", model=str(tmp_path)).close()


def test_padding_of_the_vocabulary(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Guards case 39: an id that the head's own embedding lacks is never read beyond its end."""
    layer = (("vocab_size", VOCAB_SIZE - 2),)
    head = Head(draft_vocab=50, own_embedding=True, layer=layer)
    ids = torch.arange(50) * 5
    marks = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, ids, True)
    make_eagle3(tmp_path, head, d2t=ids - torch.arange(50), t2d=marks)
    harness = Harness(SETUP.start(checkpoints.get(), method="eagle", model=str(tmp_path)))
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    harness.add("last", [VOCAB_SIZE - 1] * 5, params)
    harness.drain()
    off = Harness(Setup().start(checkpoints.get()))
    off.add("last", [VOCAB_SIZE - 1] * 5, params)
    off.drain()
    assert harness.stream("last") == off.stream("last")
    for one in (harness, off):
        one.engine.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("version", [1, 3])
def test_the_plan_counts_the_head(
    version: int, dtype: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Guards case 56: weights, KV, hidden states and buffers are in the memory plan."""
    if version == 1:
        tensors, num_taps = make_eagle1(tmp_path, num_hidden_layers=2), 1
    else:
        tensors, num_taps = make_eagle3(tmp_path, Head(norm_before_fc=True, fc_bias=True)), 3
    plain = Setup(num_blocks=20, dtype=dtype).start(checkpoints.get())
    engine = Setup(k=3, num_blocks=20, dtype=dtype).start(
        checkpoints.get(), method="eagle", model=str(tmp_path)
    )
    alone, both = plan_memory(plain.resolved), plan_memory(engine.resolved)
    size = 4 if dtype == "float32" else 2
    stored = sum(one.numel() * (size if one.dim() == 2 else 4) for one in tensors.values())
    unused_norm = 4 * 64 * (version == 1)  # of the first layer, which EAGLE-1 does without
    assert both.weights - alone.weights == stored + unused_norm
    proposer, states = engine.proposer, engine.runner.hidden_states
    assert states is not None
    assert states.storage.numel() == 20 * 4 * num_taps * 64
    caches = proposer.runtime.kv_caches  # type: ignore[union-attr]
    kept = sum(cache.nbytes for cache in caches) + states.storage.nbytes
    assert both.kv - alone.kv == kept
    assert both.buffers == engine.runner.buffers.num_bytes > alone.buffers
    for one in (plain, engine):
        one.close()
