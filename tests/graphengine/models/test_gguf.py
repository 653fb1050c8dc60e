"""GGUF files: the same model as the safetensors they were made from, and as transformers reads."""

import contextlib
import random
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

from graphengine.models.config import RopeConfig
from graphengine.models.loader import open_model
from graphengine.models.locate import locate_model
from graphengine.models.rope import rope_tables
from tests.tiny import ROPES, make_checkpoint, make_gguf

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-gqa3": (
        "llama",
        {
            "tie_word_embeddings": True,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "hidden_size": 96,
        },
    ),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("llama", {"rope_parameters": ROPES["linear"]}),
    "mistral": ("mistral", {}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": ROPES["yarn"]}),
    "qwen3": ("qwen3", {"num_key_value_heads": 4}),
}


@pytest.mark.parametrize("name", CASES)
def test_round_trip_gives_the_same_config_and_weights(name: str, tmp_path: Path) -> None:
    """Guards the name map and the q/k permutation, which turns attention to noise when left in."""
    arch, overrides = CASES[name]
    checkpoint = make_checkpoint(tmp_path / "hf", arch, **overrides)
    theirs = open_model(checkpoint)
    ours = open_model(make_gguf(checkpoint, tmp_path / "m.gguf"))
    assert sorted(ours.source.names()) == sorted(theirs.source.names())
    for tensor in ours.source.names():
        assert torch.equal(ours.source.read(tensor), theirs.source.read(tensor)), tensor
    skipped = ("architecture", "dtype", "rms_norm_eps")  # GGUF: llama for mistral; bf16; fp32 eps
    for field in ours.config.__dataclass_fields__.keys() - skipped:
        assert getattr(ours.config, field) == getattr(theirs.config, field), field
    assert ours.config.rms_norm_eps == pytest.approx(theirs.config.rms_norm_eps, rel=1e-6)
    assert ours.config.dtype == torch.bfloat16


def test_llama3_frequency_factors_are_not_lost(tmp_path: Path) -> None:
    """Guards Llama 3 GGUFs, whose rope scaling is a tensor and not a key."""
    checkpoint = make_checkpoint(tmp_path / "hf", rope_parameters=ROPES["llama3"])
    opened = open_model(make_gguf(checkpoint, tmp_path / "m.gguf"))
    assert "rope_freqs.weight" not in opened.source.names()
    for ours, theirs in zip(
        rope_tables(opened.config, 300),
        rope_tables(open_model(checkpoint).config, 300),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("encoding", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_encodings_are_dequantised_as_the_gguf_package_does(encoding: str, tmp_path: Path) -> None:
    """Guards block layouts: wrong strides give finite, plausible, wrong weights."""
    quantization = gguf.GGMLQuantizationType[encoding]
    checkpoint = make_checkpoint(tmp_path / "hf")
    path = make_gguf(checkpoint, tmp_path / "m.gguf", quantization=quantization)
    ours, exact = open_model(path).source, open_model(checkpoint).source
    for name in exact.names():
        reference = exact.read(name)
        if reference.ndim == 2:
            packed = gguf.quants.quantize(reference.numpy(), quantization)
            unpacked = torch.from_numpy(gguf.quants.dequantize(packed, quantization))
            # The blocks run along the columns, so permuting rows changes no value.
            assert torch.equal(ours.read(name).float(), unpacked), name
        else:
            assert torch.equal(ours.read(name), reference), name


def test_encodings_that_nobody_dequantises_are_named_before_weights(tmp_path: Path) -> None:
    """Guards a NotImplementedError in the middle of loading."""
    path, offset, whole = header_of(tmp_path)
    encoding = struct.pack("<I", gguf.GGMLQuantizationType.Q8_K)
    path.write_bytes(whole[: offset + 20] + encoding + whole[offset + 24 :])
    with pytest.raises(ValueError, match=r"token_embd\.weight has encoding Q8_K"):
        open_model(path)


def test_a_size_beyond_any_integer_is_no_small_one(tmp_path: Path) -> None:
    """Guards a product of dimensions that wraps to 0, which every file has room for."""
    path, offset, whole = header_of(tmp_path)
    shape = struct.pack("<QQ", 1 << 32, 1 << 32)
    path.write_bytes(whole[: offset + 4] + shape + whole[offset + 20 :])
    with pytest.raises(ValueError, match=r"is truncated: token_embd\.weight ends at"):
        open_model(path)


def header_of(tmp_path: Path) -> tuple[Path, int, bytes]:
    """A file, where the embedding's row has its number of dimensions, and the file's bytes."""
    path = make_gguf(make_checkpoint(tmp_path / "hf"), tmp_path / "m.gguf")
    whole = path.read_bytes()
    name = b"token_embd.weight"
    return path, whole.index(name) + len(name), whole


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_header_is_read_or_refused(seed: int, tmp_path: Path) -> None:
    """Guards a traceback, or a hang, for any byte that a bad disk has changed."""
    path, end, whole = header_of(tmp_path)
    rng = random.Random(seed)
    for _ in range(25):
        damaged = bytearray(whole)
        for place in rng.sample(range(end + 200), rng.choice((1, 1, 4))):
            damaged[place] = rng.choice((0, 1, 0x7F, 0xFF, rng.randrange(256)))
        path.write_bytes(damaged)
        with contextlib.suppress(ValueError):
            assert open_model(path).config.num_layers > 0


@pytest.mark.parametrize(
    ("metadata", "needle"),
    [
        ({"expert_count": 8}, "llama.expert_count=8"),
        ({"attention.sliding_window": 16}, "sliding_window=16"),
        ({"logit_scale": 0.5}, "logit_scale=0.5"),
        ({"attention.causal": False}, "causal=False"),
        ({"something.new": 3}, "llama.something.new=3"),
        ({"rope.scaling.type": "longrope"}, "'longrope'.*none, linear, yarn"),
    ],
)
def test_unknown_metadata_is_refused_by_name(
    metadata: dict[str, Any], needle: str, tmp_path: Path
) -> None:
    """Guards settings that only other engines know, silently ignored."""
    path = make_gguf(make_checkpoint(tmp_path / "hf"), tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(ValueError, match=needle):
        open_model(path)


def test_inert_metadata_is_accepted(tmp_path: Path) -> None:
    """Guards real files, which spell out settings that do nothing."""
    inert = {"expert_count": 0, "attention.causal": True, "rope.scaling.type": "none"}
    path = make_gguf(make_checkpoint(tmp_path / "hf"), tmp_path / "m.gguf", metadata=inert)
    assert open_model(path).config.num_layers == 2


def test_broken_files_are_named(tmp_path: Path) -> None:
    """Guards half-downloaded files: an error at start, not noise for weights."""
    path = make_gguf(make_checkpoint(tmp_path / "hf"), tmp_path / "m.gguf")
    whole = path.read_bytes()
    for size, needle in ((len(whole) - 1000, "truncated"), (300, "truncated"), (0, "empty")):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=rf"m\.gguf is {needle}"):
            open_model(path)
    path.write_bytes(b"PK\x03\x04" + whole[4:])
    with pytest.raises(ValueError, match="does not start with 'GGUF'"):
        open_model(path)
    path.write_bytes(whole[:4] + b"\x01" + whole[5:])
    with pytest.raises(ValueError, match="GGUF version 1"):
        open_model(path)
    writer = gguf.GGUFWriter(path, "gemma")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        ValueError, match=r"'gemma' is not supported; supported: llama, qwen2, qwen3"
    ):
        open_model(path)


def test_a_scaling_factor_without_a_type_is_linear(tmp_path: Path) -> None:
    """Guards old files, which every other reader scales linearly."""
    metadata = {"rope.scaling.factor": 4.0}
    path = make_gguf(make_checkpoint(tmp_path / "hf"), tmp_path / "m.gguf", metadata=metadata)
    assert open_model(path).config.rope == RopeConfig(kind="linear", theta=10000.0, factor=4.0)


@pytest.mark.parity
@pytest.mark.parametrize("name", ["llama-tied-gqa3", "qwen2-yarn"])
def test_transformers_reads_the_same_tensors(name: str, tmp_path: Path) -> None:
    """Guards our own writer and reader against being wrong in the same way."""
    arch, overrides = CASES[name]
    checkpoint = make_checkpoint(tmp_path / "hf", arch, **overrides)
    path = make_gguf(checkpoint, tmp_path / "m.gguf", quantization=gguf.GGMLQuantizationType.Q8_0)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    )
    source = open_model(path).source
    parameters = dict(reference.named_parameters())  # a tied head is listed once
    assert sorted(source.names()) == sorted(parameters)
    for tensor, parameter in parameters.items():
        assert torch.equal(source.read(tensor), parameter.detach()), tensor


@pytest.mark.slow
@pytest.mark.parity
def test_demo_model_equals_transformers_tensor_by_tensor() -> None:
    """Guards the demo: every parameter of SmolLM2 mapped, unpermuted and dequantised the same."""
    path = locate_model("smollm2-135m").path
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    opened = open_model("smollm2-135m")
    parameters = dict(reference.named_parameters())  # a tied head is listed once
    assert sorted(opened.source.names()) == sorted(parameters)
    for name, parameter in parameters.items():
        assert torch.equal(opened.source.read(name), parameter.detach()), name
    assert opened.config.rms_norm_eps == reference.config.rms_norm_eps
    assert opened.config.rope.theta == reference.config.rope_parameters["rope_theta"]
