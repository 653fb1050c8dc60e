"""Cost-inflated targets: a small trained model at the cost of a big one, computing the same tokens.

Acceptance is that of the small model and time is that of the big shape: a figure from such a model
must say so. Padding of the residual stream is zero for ever, and so is whatever could write to it,
or to the stream out of added heads, units and layers. What only reads is random: no kernel meets a
matrix of zeros. RMS norms take their mean over the padded width, and their gains and epsilon are
rescaled for that: exact where the ratio of widths is a power of 4 and heads are as wide as they
were, else equal to rounding. Heads of drafts: `inflate_heads.py`.

    python -m profiles.inflate tests/weights/tiny/target OUT --preset 8b
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from safetensors.torch import save_file

from graphengine.models.config import ModelConfig
from graphengine.models.loader import open_model
from graphengine.models.tokenizer import TOKENIZER_FILES
from graphengine.models.weights import WeightSource

_BESIDE: Final = ("tokenizer_config", "chat_template", "generation_config")
Tensor = torch.Tensor
Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What a shape costs."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @classmethod
    def of(cls, config: ModelConfig) -> Sizes:
        return cls(**{one.name: getattr(config, one.name) for one in fields(cls)})

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def layer_elements(self) -> int:
        """Elements of one layer's matrices."""
        heads = 2 * self.num_heads + 2 * self.num_kv_heads
        return self.hidden_size * (heads * self.head_dim + 3 * self.intermediate_size)

    def weight_bytes(self, itemsize: int = 2) -> int:
        """Bytes of all parameters: matrices of `itemsize`, embedding and head apart, fp32 norms."""
        tables = 2 * self.vocab_size * self.hidden_size
        norms = 4 * self.hidden_size * (2 * self.num_layers + 1)
        return itemsize * (self.num_layers * self.layer_elements + tables) + norms

    def step_bytes(self, *, num_reqs: int, kv_len: int, itemsize: int = 2) -> int:
        """Bytes that a step cannot do without: every matrix but the embedding, and the KV cache.

        Args:
            kv_len: of each request.
        """
        head = self.vocab_size * self.hidden_size
        token = 2 * self.num_kv_heads * self.head_dim * self.num_layers
        return itemsize * (self.num_layers * self.layer_elements + head + num_reqs * kv_len * token)


PRESETS: Final = MappingProxyType(
    {
        "8b": Sizes(
            hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32,
            num_kv_heads=8, head_dim=128, vocab_size=128256,
        ),
        "1b": Sizes(
            hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=32,
            num_kv_heads=8, head_dim=64, vocab_size=128256,
        ),
        "small": Sizes(
            hidden_size=512, intermediate_size=1024, num_layers=6, num_heads=16,
            num_kv_heads=4, head_dim=64, vocab_size=1024,
        ),
    }
)  # fmt: skip


class Filler:
    """Random numbers of one dtype, from one pool that is gone through again and again."""

    def __init__(self, dtype: torch.dtype, seed: int = 0, size: int = (1 << 22) + 331) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._pool = (0.02 * torch.randn(size, generator=generator)).to(dtype)
        self._at = 0

    def matrix(self, rows: int, columns: int) -> Tensor:
        out = torch.empty(rows * columns, dtype=self._pool.dtype)
        done = 0
        while done < len(out):
            part = self._pool[self._at : self._at + len(out) - done]
            out[done : done + len(part)] = part
            done += len(part)
            self._at = (self._at + len(part)) % len(self._pool)
        return out.view(rows, columns)


class Inflater:
    """Places the parameters of one shape inside those of a larger one.

    Args:
        old, new: the shapes.
        dtype: of the matrices.

    Raises:
        ValueError: the old shape does not fit into the new one.
    """

    def __init__(self, old: Sizes, new: Sizes, dtype: torch.dtype) -> None:
        for one in fields(Sizes):
            small, large = getattr(old, one.name), getattr(new, one.name)
            if large < small:
                raise ValueError(f"{one.name}={large}: the model has {small}, which must fit")
        if new.group < old.group or new.head_dim % old.head_dim:
            raise ValueError(
                f"{new.group} query heads a KV head of {new.head_dim}: the model has {old.group} "
                f"of {old.head_dim}; expected no fewer, and a multiple"
            )
        self.old, self.new, self.dtype = old, new, dtype
        self._filler = Filler(dtype)
        # Rotation i of the old head is the one of the same frequency in the new.
        half, step = old.head_dim // 2, new.head_dim // old.head_dim
        first = torch.arange(half) * step
        self._dims = torch.cat([first, first + new.head_dim // 2])
        heads = torch.arange(old.num_heads)
        self._q_rows = self._rows(heads // old.group * new.group + heads % old.group)
        self._kv_rows = self._rows(torch.arange(old.num_kv_heads))

    @property
    def norm_scale(self) -> float:
        """Of every gain, for a mean over so much more of zero."""
        return math.sqrt(self.old.hidden_size / self.new.hidden_size)

    def eps(self, eps: float) -> float:
        return eps * self.old.hidden_size / self.new.hidden_size

    def norm(self, weight: Tensor) -> Tensor:
        out = torch.ones(self.new.hidden_size)
        out[: self.old.hidden_size] = weight.float() * self.norm_scale
        return out

    def reader(self, matrix: Tensor, num_rows: int, rows: Tensor | None = None) -> Tensor:
        """A matrix that reads the stream, or several beside each other: random where it is new."""
        rows = torch.arange(len(matrix)) if rows is None else rows
        columns, width = self._columns(matrix.shape[1])
        out = self._filler.matrix(num_rows, width)
        out[rows[:, None], columns] = matrix.to(self.dtype)
        return out

    def writer(self, matrix: Tensor, width: int, columns: Tensor | None = None) -> Tensor:
        """A matrix that writes to the stream: zero where it is new."""
        columns = torch.arange(matrix.shape[1]) if columns is None else columns
        out = torch.zeros(self.new.hidden_size, width, dtype=self.dtype)
        out[torch.arange(len(matrix))[:, None], columns] = matrix.to(self.dtype)
        return out

    def embedding(self, matrix: Tensor) -> Tensor:
        out = torch.zeros(self.new.vocab_size, self.new.hidden_size, dtype=self.dtype)
        out[: len(matrix), : matrix.shape[1]] = matrix.to(self.dtype)
        return out

    def head(self, matrix: Tensor, num_rows: int) -> Tensor:
        """Logits: those of new ids are the mean of the old ones', which is never the largest."""
        out = self.reader(matrix, num_rows)
        out[len(matrix) :, : matrix.shape[1]] = matrix.float().mean(0).to(self.dtype)
        return out

    def layer(self, tensors: Tensors) -> Tensors:
        """A layer's parameters by their names within it; norms that it lacks stay lacking."""
        new, q_dim, kv_dim = self.new, self._q_dim, self._kv_dim
        scale = math.sqrt(new.head_dim / self.old.head_dim)  # of scores, which the width divides
        out = {name: self.norm(one) for name, one in tensors.items() if one.dim() == 1}
        q, k = tensors["self_attn.q_proj.weight"].float() * scale, "self_attn.k_proj.weight"
        out["self_attn.q_proj.weight"] = self.reader(q, q_dim, self._q_rows)
        out[k] = self.reader(tensors[k], kv_dim, self._kv_rows)
        # Where a head has grown, whatever q has there meets zero.
        grown = torch.ones(kv_dim, dtype=torch.bool)
        grown[self._kv_rows], grown[self.old.num_kv_heads * new.head_dim :] = False, False
        out[k][grown] = 0
        name = "self_attn.v_proj.weight"
        out[name] = self.reader(tensors[name], kv_dim, self._kv_rows)
        name = "self_attn.o_proj.weight"
        out[name] = self.writer(tensors[name], q_dim, self._q_rows)
        for name in ("mlp.gate_proj.weight", "mlp.up_proj.weight"):
            out[name] = self.reader(tensors[name], new.intermediate_size)
        name = "mlp.down_proj.weight"
        out[name] = self.writer(tensors[name], new.intermediate_size)
        return out

    def idle_layer(self) -> Tensors:
        """A layer that costs what the others do and adds nothing."""
        new, q_dim, kv_dim = self.new, self._q_dim, self._kv_dim
        readers = {
            "self_attn.q_proj": q_dim,
            "self_attn.k_proj": kv_dim,
            "self_attn.v_proj": kv_dim,
            "mlp.gate_proj": new.intermediate_size,
            "mlp.up_proj": new.intermediate_size,
        }
        nothing = torch.zeros(0, 0)
        out = {
            f"{name}.weight": self._filler.matrix(rows, new.hidden_size)
            for name, rows in readers.items()
        }
        out["self_attn.o_proj.weight"] = self.writer(nothing, q_dim)
        out["mlp.down_proj.weight"] = self.writer(nothing, new.intermediate_size)
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            out[name] = torch.full((new.hidden_size,), self.norm_scale)
        return out

    @property
    def _q_dim(self) -> int:
        return self.new.num_heads * self.new.head_dim

    @property
    def _kv_dim(self) -> int:
        return self.new.num_kv_heads * self.new.head_dim

    def _rows(self, heads: Tensor) -> Tensor:
        return (heads[:, None] * self.new.head_dim + self._dims).flatten()

    def _columns(self, width: int) -> tuple[Tensor, int]:
        """Where columns go that are so many streams beside each other, and the new width."""
        streams = width // self.old.hidden_size
        assert width == streams * self.old.hidden_size, f"{width} columns are no whole streams"
        starts = torch.arange(streams)[:, None] * self.new.hidden_size
        return (starts + torch.arange(self.old.hidden_size)).flatten(), streams * (
            self.new.hidden_size
        )


def inflate(
    model: str | Path,
    folder: Path,
    sizes: Sizes,
    *,
    dtype: torch.dtype = torch.bfloat16,
    max_model_len: int | None = None,
) -> Path:
    """Write the model in a larger shape, one file a layer, and return the folder.

    Its embedding and its output head are two matrices, whatever the model's are. Greedy text is the
    same; sampled text is not, since new ids have a share.

    Args:
        model: a Llama without biases and with plain rope: a Hugging Face folder or a GGUF file.
        folder: made if missing.
        max_model_len: another limit of the context than the model's.

    Raises:
        ValueError: a model of another kind, or one that does not fit.
    """
    opened = open_model(model)
    config = opened.config
    _check_plain(config)
    inflater = Inflater(Sizes.of(config), sizes, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(_shards(inflater, opened.source, config)):
        file = f"model-{number:05}.safetensors"
        save_file({name: one.contiguous() for name, one in shard.items()}, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    values = _config(config, inflater, max_model_len or config.max_position_embeddings)
    (folder / "config.json").write_text(json.dumps(values, indent=1), encoding="utf-8")
    if opened.location.kind != "gguf":
        for path in opened.location.path.iterdir():
            if path.name in TOKENIZER_FILES or path.name.startswith(_BESIDE):
                shutil.copy(path, folder / path.name)
    return folder


def _shards(inflater: Inflater, source: WeightSource, config: ModelConfig) -> Iterator[Tensors]:
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    norm = "model.norm.weight"
    yield {embedding: inflater.embedding(source.read(embedding))}
    stored = source.read(head if head in set(source.names()) else embedding)
    yield {
        head: inflater.head(stored, inflater.new.vocab_size),
        norm: inflater.norm(source.read(norm)),
    }
    names = list(source.names())
    for number in range(inflater.new.num_layers):
        prefix = f"model.layers.{number}."
        mine = [name for name in names if name.startswith(prefix)]
        layer = (
            inflater.layer({name.removeprefix(prefix): source.read(name) for name in mine})
            if number < config.num_layers
            else inflater.idle_layer()
        )
        yield {prefix + name: tensor for name, tensor in layer.items()}


def _check_plain(config: ModelConfig) -> None:
    plain = not (config.qkv_bias or config.o_bias or config.mlp_bias or config.qk_norm)
    rope = config.rope
    if not plain or rope.kind != "default" or rope.frequency_factors or config.sliding_window:
        raise ValueError(
            f"{config.architecture}: expected a Llama without biases, head norms and window, and "
            "with plain rope"
        )


def _config(config: ModelConfig, inflater: Inflater, max_model_len: int) -> dict[str, Any]:
    new = inflater.new
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        **named(new),
        "num_hidden_layers": new.num_layers,
        "max_position_embeddings": max_model_len,
        "rms_norm_eps": inflater.eps(config.rms_norm_eps),
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": False,
        "eos_token_id": list(config.eos_token_ids),
        "torch_dtype": str(inflater.dtype).removeprefix("torch."),
    }


def named(sizes: Sizes) -> dict[str, int]:
    """Sizes of a layer and of the vocabulary, under the names of a config file."""
    return {
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--preset", default="8b", choices=list(PRESETS))
    parser.add_argument("--max-model-len", type=int)
    args = parser.parse_args(arguments)
    sizes = PRESETS[args.preset]
    inflate(args.model, args.folder, sizes, max_model_len=args.max_model_len)
    print(f"{args.folder}: {args.preset}, {sizes.weight_bytes():,} bytes of parameters")


if __name__ == "__main__":
    main()
