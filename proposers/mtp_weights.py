"""Layers for multi-token prediction: opened by their headers, checked, loaded.

Owns whose sizes they have and where each tensor goes. Names and kinds are those of `mtp_config.py`;
what is computed with the weights is `mtp.py`'s business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from proposers.checkpoint import DraftCheckpoint
from proposers.device import Architecture, Block, DraftRuntime, DraftSite
from proposers.mtp_config import MtpConfig, read_mtp_config

Tensor = torch.Tensor

# Sizes that a config.json of its own may leave to the target, and what the target calls them.
_SIZES: Final = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "rms_norm_eps",
    "max_position_embeddings": "max_position_embeddings",
}


@dataclass(frozen=True, slots=True)
class MtpLayer:
    """One layer, ready to run; matrices in the engine's dtype, norms fp32."""

    embedding: Tensor  # [vocab, hidden]
    embed_norm: Tensor  # [hidden]
    hidden_norm: Tensor  # [hidden]
    projection: Tensor  # [hidden, 2 * hidden]
    block: Block
    final_norm: Tensor  # [hidden]
    head: Tensor  # [vocab, hidden]


@dataclass(frozen=True, slots=True)
class OpenedMtp:
    """Layers whose headers have been read and whose weights have not.

    Attributes:
        checkpoint: where they lie.
        config: their names and arithmetic.
        architecture: of their blocks.
        parameters: of the layers that are used, by their names in the checkpoint, on the meta
            device.
        num_layers: how many these are.
    """

    checkpoint: DraftCheckpoint
    config: MtpConfig
    architecture: Architecture
    parameters: Mapping[str, Tensor]
    num_layers: int

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.parameters.values())

    def load(self, runtime: DraftRuntime) -> list[MtpLayer]:
        """Read the weights; each layer takes one of the runtime's KV caches.

        Raises:
            ValueError: the output heads of two layers differ.
        """
        blocks = [runtime.block(self.architecture, cache) for cache in runtime.kv_caches]
        tensors = {
            self.config.block(depth, part): view
            for depth, block in enumerate(blocks)
            for part, view in block.destinations().items()
        }
        for name in self.parameters.keys() - tensors.keys():
            tensors[name] = torch.empty_like(self.parameters[name], device=runtime.device)
        self.checkpoint.load(tensors, ignores=lambda name: True)  # all others have been checked
        if self.config.family.norms_add_one:
            for name, tensor in tensors.items():
                if tensor.dim() == 1 and name.endswith(".weight"):
                    tensor.add_(1)
        layers = [self._layer(depth, block, tensors, runtime) for depth, block in enumerate(blocks)]
        for depth, layer in enumerate(layers):
            if not torch.equal(layer.head, layers[0].head):
                raise ValueError(
                    f"{self.checkpoint.path}: {self.config.head(depth)} differs from "
                    f"{self.config.head(0)}; the layers' output heads must be copies of one"
                )
        # Equal copies are kept once.
        return [
            replace(
                layer,
                head=layers[0].head,
                embedding=_shared(layer.embedding, layers[0].embedding),
            )
            for layer in layers
        ]

    def _layer(
        self, depth: int, block: Block, tensors: Mapping[str, Tensor], runtime: DraftRuntime
    ) -> MtpLayer:
        config, family = self.config, self.config.family
        return MtpLayer(
            embedding=(
                tensors[config.embedding(depth)]
                if config.has_embedding
                else runtime.target_embedding
            ),
            embed_norm=tensors[config.outer(depth, family.embed_norm)],
            hidden_norm=tensors[config.outer(depth, family.hidden_norm)],
            projection=tensors[config.outer(depth, family.projection)],
            block=block,
            final_norm=tensors[config.outer(depth, family.final_norm)],
            head=tensors[config.head(depth)] if config.has_head else runtime.target_head,
        )


def _shared(tensor: Tensor, first: Tensor) -> Tensor:
    return first if torch.equal(tensor, first) else tensor


def open_mtp(site: DraftSite) -> OpenedMtp:
    """Find the layers and hold every header to what they must be.

    Raises:
        ValueError: there are none, or they are not for this target.
    """
    target, apart = site.target, site.model is not None
    if not apart and not site.target_path.is_dir():
        raise ValueError(
            f"{site.target_path}: layers for multi-token prediction are read from safetensors "
            "alone; give their directory as SpeculativeConfig('mtp', model=DIRECTORY)"
        )
    checkpoint = DraftCheckpoint.open(site.model if site.model is not None else site.target_path)
    config = read_mtp_config(checkpoint, num_layers=None if apart else target.num_layers)
    architecture = _architecture(site, checkpoint) if apart else target
    if architecture.hidden_size != target.hidden_size:
        raise ValueError(
            f"{checkpoint.path}: hidden_size={architecture.hidden_size} in config.json, the "
            f"target's is {target.hidden_size}; use layers that were trained for this target"
        )
    parameters = _parameters(config, site, architecture, config.num_layers)
    _refuse_gates(config, parameters, checkpoint)
    checkpoint.check(parameters, ignores=lambda name: not apart and not config.owns(name))
    # A layer behind the last draft would only cost time.
    num_layers = min(config.num_layers, site.max_draft_tokens)
    parameters = _parameters(config, site, architecture, num_layers)
    return OpenedMtp(checkpoint, config, architecture, parameters, num_layers)


def _architecture(site: DraftSite, checkpoint: DraftCheckpoint) -> Architecture:
    """Of the blocks in a directory of their own: what its config.json says, else the target's."""
    raw: Mapping[str, Any] = checkpoint.config
    if raw.get("quantization_config") is not None:
        raise ValueError(
            f"{checkpoint.path}: quantization_config={raw['quantization_config']!r} is not "
            "implemented; use layers that are not quantised"
        )
    raw = raw.get("transformer_layer_config", raw)  # as the speculators package nests it
    if not isinstance(raw, Mapping):
        raise ValueError(f"{checkpoint.path}: transformer_layer_config={raw!r} is no object")
    if raw.get("architectures") is None and raw.get("model_type") is None:
        return site.target
    sizes = {key: getattr(site.target, field) for key, field in _SIZES.items()}
    try:
        return site.read_architecture({**sizes, **raw})
    except ValueError as error:
        raise ValueError(f"{checkpoint.path}: {error}") from error


def _parameters(
    config: MtpConfig, site: DraftSite, architecture: Architecture, num_layers: int
) -> dict[str, Tensor]:
    """All that the first layers must have, on the meta device."""
    family, hidden, meta = config.family, architecture.hidden_size, torch.device("meta")
    norm = torch.empty(hidden, dtype=torch.float32, device=meta)
    projection = torch.empty(hidden, 2 * hidden, dtype=site.dtype, device=meta)
    vocabulary = torch.empty(site.target.vocab_size, hidden, dtype=site.dtype, device=meta)
    block = site.block_parameters(architecture)
    found: dict[str, Tensor] = {}
    for depth in range(num_layers):
        for part in (family.embed_norm, family.hidden_norm, family.final_norm):
            found[config.outer(depth, part)] = norm
        found[config.outer(depth, family.projection)] = projection
        found |= {config.block(depth, part): tensor for part, tensor in block.items()}
        if config.has_embedding:
            found[config.embedding(depth)] = vocabulary
        if config.has_head:
            found[config.head(depth)] = vocabulary
    return found


def _refuse_gates(
    config: MtpConfig, parameters: Mapping[str, Tensor], checkpoint: DraftCheckpoint
) -> None:
    """Qwen3-Next's attention has its gate in the rows of the queries."""
    for depth in range(config.num_layers):
        name = config.block(depth, "self_attn.q_proj.weight")
        rows, found = len(parameters[name]), checkpoint.shapes.get(name, (0,))[0]
        if found == 2 * rows:
            raise ValueError(
                f"{checkpoint.path}: {name} has {found} rows, twice as many as there are "
                "queries: attention with an output gate is not supported; use a checkpoint "
                "without it, or the proposers eagle or ngram"
            )
