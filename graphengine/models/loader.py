"""Opening a checkpoint, and filling a model's parameters from it.

`open_model` reads headers only: config and the list of tensors. `load_weights` then copies one
tensor at a time straight into its destination, so that beside the model itself one tensor is in
memory at most. Every parameter and every tensor is accounted for, by name. Knows nothing of the
decoder's layout.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphengine.models.config import ModelConfig
from graphengine.models.gguf_config import read_gguf_config
from graphengine.models.gguf_file import GGUFFile
from graphengine.models.hf_config import read_hf_config
from graphengine.models.locate import ModelLocation, locate_model
from graphengine.models.sampling_defaults import (
    SamplingDefaults,
    gguf_sampling_defaults,
    hf_sampling_defaults,
)
from graphengine.models.tokenizer import TOKENIZER_FILES, Tokenizer
from graphengine.models.values import some_of
from graphengine.models.weights import GGUFSource, SafetensorsSource, WeightSource

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_ROWS = 1024

# Tensors that old checkpoints carry and that the config already determines.
_IGNORABLE = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
# Layers for multi-token prediction: by a prefix of their own, with an index where there are many.
_MTP_PREFIX = re.compile(r"(model\.mtp_layers\.|model\.mtp\.layers\.|mtp\.layers\.)(\d+)\.")
_MTP_SHARED = re.compile(r"mtp\.(?!layers\.)")

Progress = Callable[[int, int, str], None]  # tensors done, tensors in all, name of the last


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedModel:
    """A checkpoint whose headers have been read and whose weights have not."""

    location: ModelLocation
    config: ModelConfig
    source: WeightSource
    has_tokenizer: bool
    sampling_defaults: SamplingDefaults

    def load_tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer; None where it has none and prompts are token ids."""
        return Tokenizer.load(self.location.path) if self.has_tokenizer else None


def open_model(model: str | Path) -> OpenedModel:
    """Find a checkpoint (see `locate_model`) and read its headers.

    Raises:
        ValueError: The checkpoint is missing, malformed, or asks for something that is not
            implemented.
    """
    location = locate_model(model)
    if location.kind == "gguf":
        file = GGUFFile(location.path)
        config = read_gguf_config(file)
        return OpenedModel(
            location=location,
            config=config,
            source=GGUFSource(file, config),
            has_tokenizer="tokenizer.ggml.tokens" in file.metadata,
            sampling_defaults=gguf_sampling_defaults(str(location.path), file.metadata),
        )
    source = SafetensorsSource(location.path)
    raw = _read_json(location.path / "config.json")
    generation_path = location.path / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.is_file() else {}
    config = read_hf_config(raw, generation=generation, fallback_dtype=source.float_dtype())
    return OpenedModel(
        location=location,
        config=config,
        source=source,
        has_tokenizer=any((location.path / name).is_file() for name in TOKENIZER_FILES),
        sampling_defaults=hf_sampling_defaults(str(generation_path), generation),
    )


@torch.no_grad()
def load_weights(
    destinations: Mapping[str, Tensor],
    source: WeightSource,
    *,
    config: ModelConfig,
    progress: Progress | None = None,
) -> None:
    """Fill every destination from the source.

    Args:
        destinations: Canonical name -> the tensor, or the view of a fused tensor, to write. With a
            tied head, `lm_head.weight` may be left out (the decoder reuses the embedding) or be
            here (it is filled with the embedding's values). Any dtype: the copy converts, rounding
            to nearest.
        source: Where the tensors come from.
        config: Says whether the head is tied.
        progress: Called after each tensor.

    Raises:
        ValueError: A destination without a tensor, a tensor without a destination, a shape that
            differs, or a checkpoint whose head contradicts `tie_word_embeddings`. Names and shapes
            are checked before anything is read.
    """
    plan = _plan(destinations, source, config)
    for done, (name, stored) in enumerate(plan.items(), start=1):
        # No local holds the tensor: it would live on while the next one is read.
        destinations[name].copy_(source.read(stored))
        if progress is not None:
            progress(done, len(plan), name)
    if config.tie_word_embeddings and {EMBEDDING, HEAD} <= set(source.names()):
        _check_tied(destinations[EMBEDDING], source)


def check_weights(
    destinations: Mapping[str, Tensor], source: WeightSource, *, config: ModelConfig
) -> None:
    """Hold names and shapes to a source's headers; destinations may be on the meta device.

    Raises:
        ValueError: as `load_weights`; nothing is read.
    """
    _plan(destinations, source, config)


def _plan(
    destinations: Mapping[str, Tensor], source: WeightSource, config: ModelConfig
) -> dict[str, str]:
    """Destination name -> name in the source.

    All names are accounted for and all shapes are those of the destinations.
    """
    stored = {name for name in source.names() if not _IGNORABLE.search(name)}
    stored -= _mtp_tensors(stored, config)
    plan = {name: name for name in destinations if name in stored}
    if config.tie_word_embeddings:
        if stored & {EMBEDDING, HEAD}:
            only = EMBEDDING if EMBEDDING in stored else HEAD
            plan.update({name: only for name in (EMBEDDING, HEAD) if name in destinations})
            stored -= {EMBEDDING, HEAD}
    elif HEAD in destinations and HEAD not in stored:
        raise ValueError(
            f"{HEAD} is missing from the checkpoint and tie_word_embeddings is false; set it to "
            "true in config.json if the output head is the embedding"
        )
    missing = [name for name in destinations if name not in plan]
    if missing:
        raise ValueError(f"the checkpoint lacks {len(missing)} parameters: {some_of(missing)}")
    unused = sorted(stored - set(plan))
    if unused:
        raise ValueError(
            f"the checkpoint holds {len(unused)} tensors that {config.architecture} has no place "
            f"for: {some_of(unused)}"
        )
    for name, tensor in destinations.items():
        if source.shape(plan[name]) != tensor.shape:
            raise ValueError(
                f"{name}: the checkpoint has shape {list(source.shape(plan[name]))}, the config "
                f"implies {list(tensor.shape)}"
            )
    return plan


def _mtp_tensors(stored: set[str], config: ModelConfig) -> set[str]:
    """Names of the layers for multi-token prediction that the config says are there.

    DeepSeek's count on behind the model's own. One is known by its `eh_proj`: an ordinary layer
    behind the last is a num_hidden_layers that is too small.
    """
    behind = range(config.num_layers, config.num_layers + config.num_mtp_layers)
    prefixes = tuple(f"model.layers.{index}." for index in behind)
    known = tuple(prefix for prefix in prefixes if f"{prefix}eh_proj.weight" in stored)
    return {
        name
        for name in stored
        if name.startswith(known)
        or ((match := _MTP_PREFIX.match(name)) and int(match[2]) < config.num_mtp_layers)
        or (config.num_mtp_layers and _MTP_SHARED.match(name))
    }


def _check_tied(embedding: Tensor, source: WeightSource) -> None:
    """Hold a stored head to the loaded embedding, in whose place and dtype it is used."""
    same = source.shape(HEAD) == embedding.shape
    if same:
        # By rows, so that no second matrix is made by the conversion.
        rows = zip(embedding.split(_ROWS), source.read(HEAD).split(_ROWS), strict=True)
        same = all(torch.equal(ours, theirs.to(ours)) for ours, theirs in rows)
    if not same:
        # Readers disagree on which one counts, so there is no safe choice.
        raise ValueError(
            f"tie_word_embeddings is true but {HEAD} differs from {EMBEDDING} in the checkpoint; "
            "set tie_word_embeddings to false in config.json to use both"
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return parsed
