"""Where weights come from: a protocol, and its safetensors and GGUF sources.

A source hands out one tensor at a time under its Hugging Face name, from memory-mapped files, so
that loading never holds a second copy of the model. Knows nothing of where the tensors go.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import safetensors
import torch
from torch import Tensor

from graphengine.models.config import ModelConfig
from graphengine.models.gguf_config import ROPE_FACTORS_TENSOR
from graphengine.models.gguf_file import GGUFFile
from graphengine.models.values import some_of

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class WeightSource(Protocol):
    """Named tensors that are read one at a time."""

    def names(self) -> Sequence[str]:
        """Canonical names of all tensors, such as `model.layers.0.self_attn.q_proj.weight`."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, from the header."""

    def read(self, name: str) -> Tensor:
        """One tensor on the CPU, in its stored (or dequantised) dtype; treat it as read-only."""


class SafetensorsSource:
    """The weights of a Hugging Face directory: one file, or shards with an index.

    Raises:
        ValueError: No weights, a shard that is missing or corrupt, an index that does not agree
            with the shards, or a stored dtype that is not fp32, bf16 or fp16; the message names the
            file.
    """

    def __init__(self, directory: Path) -> None:
        self._handles: dict[str, Any] = {}  # tensor name -> open file
        single, index = directory / SINGLE_FILE, directory / INDEX_FILE
        if single.is_file():
            self._add_file(single)
        elif index.is_file():
            self._add_shards(directory, _read_index(index))
        else:
            raise ValueError(f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}")

    def names(self) -> Sequence[str]:
        return list(self._handles)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handles[name].get_slice(name).get_shape())

    def float_dtype(self) -> torch.dtype:
        """Dtype of the first tensor, from the headers.

        Raises:
            ValueError: There is none.
        """
        for name, handle in self._handles.items():
            return _DTYPES[handle.get_slice(name).get_dtype()]
        raise ValueError("the checkpoint holds no tensor")

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._handles[name].get_tensor(name)
        return tensor

    def _add_file(self, path: Path) -> None:
        try:
            handle: Any = safetensors.safe_open(path, framework="pt")
        except (safetensors.SafetensorError, OSError) as error:
            raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
        names: Sequence[str] = handle.keys()
        for name in names:
            if name in self._handles:
                raise ValueError(f"{path}: tensor {name} is in another shard too")
            self._handles[name] = handle
            stored = handle.get_slice(name).get_dtype()
            if stored not in _DTYPES:  # a copy would cast it, without the scales beside it
                raise ValueError(
                    f"{path}: tensor {name} is stored as {stored}; allowed are {', '.join(_DTYPES)}"
                )

    def _add_shards(self, directory: Path, weight_map: dict[str, str]) -> None:
        for shard in sorted(set(weight_map.values())):
            path = directory / shard
            if not path.is_file():
                raise ValueError(f"{INDEX_FILE} names {shard}, which is missing from {directory}")
            self._add_file(path)
        absent = [name for name in weight_map if name not in self._handles]
        if absent:
            raise ValueError(
                f"{directory}: {INDEX_FILE} names tensors that no shard holds: {some_of(absent)}"
            )


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a safetensors index with a weight_map: {error!r}"
        ) from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path}: weight_map must be a non-empty object")
    for shard in weight_map.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"{path}: {shard!r} is not a plain file name")
    return weight_map


_GGUF_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFSource:
    """The weights of a GGUF file, dequantised one by one, under Hugging Face names.

    A tensor whose name is unknown keeps it, so that the loader can refuse it. Llama files store the
    rows of q and k permuted for a rotation of neighbouring dimensions; the permutation is undone
    here.
    """

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self._file = file
        # The frequency factors are already in the rope config.
        self._stored = {_canonical(n): n for n in file.tensors if n != ROPE_FACTORS_TENSOR}
        self._heads_permuted: dict[str, int] = {}
        if file.metadata["general.architecture"] == "llama":
            self._heads_permuted = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}

    def names(self) -> Sequence[str]:
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._stored[name]].shape

    def read(self, name: str) -> Tensor:
        stored = self._stored[name]
        tensor = self._file.read(stored)
        parts = stored.split(".")
        num_heads = self._heads_permuted.get(parts[2]) if len(parts) == 4 else None
        return tensor if num_heads is None else _halves_from_neighbours(tensor, num_heads)


def _canonical(gguf_name: str) -> str:
    if gguf_name in _GGUF_GLOBAL:
        return _GGUF_GLOBAL[gguf_name]
    parts = gguf_name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _GGUF_LAYER:
        return f"model.layers.{parts[1]}.{_GGUF_LAYER[parts[2]]}.{parts[3]}"
    return gguf_name


def _halves_from_neighbours(tensor: Tensor, num_heads: int) -> Tensor:
    """Reorder the rows of each head from (pair, member) to (member, pair); same shape."""
    pairs = tensor.shape[0] // num_heads // 2
    split = tensor.reshape(num_heads, pairs, 2, *tensor.shape[1:])
    return split.transpose(1, 2).reshape(tensor.shape)
