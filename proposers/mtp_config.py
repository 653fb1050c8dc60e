"""Which multi-token-prediction layers a checkpoint has, told from the names of its tensors.

Owns the table of families, in what they differ, and the refusals. A family is known by its names
alone: the same layers lie in a target's own checkpoint and in directories of their own. Knows
nothing of how they are run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from proposers.checkpoint import DraftCheckpoint

COUNT_KEYS: Final = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Names and arithmetic of one family. In names, `{}` is the index of a layer.

    Attributes:
        name: how messages call it.
        outer: prefix of the norms around the projection, the projection and the final norm; without
            an index where all layers share them.
        block: prefix of the transformer block.
        embed_norm, hidden_norm, projection, final_norm: behind `outer`.
        post_norm: what the block calls its norm before the MLP.
        embedding, head: whole names of copies that it may bring; without them, the target's.
        hidden_first: the projection reads (hidden, embedding), else (embedding, hidden).
        norms_add_one: norms multiply by 1 + weight.
        zero_first: the embedding at position 0 counts as zero.
    """

    name: str
    outer: str
    block: str
    embed_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    post_norm: str = "post_attention_layernorm"
    embedding: str | None = None
    head: str | None = None
    hidden_first: bool = False
    norms_add_one: bool = False
    zero_first: bool = False

    def indices(self, names: Iterable[str]) -> list[int]:
        """The layers that are there, in order: told by a tensor that ordinary layers do not have,
        or by one of a prefix that they do not have.
        """
        shared = "{}" not in self.outer
        sign = f"{self.block}input_layernorm" if shared else f"{self.outer}{self.projection}"
        pattern = re.compile(re.escape(f"{sign}.weight").replace(r"\{\}", r"(\d+)"))
        return sorted(int(match[1]) for name in names if (match := pattern.fullmatch(name)))


_MIMO = Family(
    name="MiMo",
    outer="model.mtp_layers.{}.",
    block="model.mtp_layers.{}.",
    embed_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    projection="input_proj",
    final_norm="final_layernorm",
    hidden_first=True,
    zero_first=True,
)
_DEEPSEEK = Family(
    name="DeepSeek",
    outer="model.layers.{}.",
    block="model.layers.{}.",
    embed_norm="enorm",
    hidden_norm="hnorm",
    projection="eh_proj",
    final_norm="shared_head.norm",
    embedding="model.layers.{}.embed_tokens.weight",
    head="model.layers.{}.shared_head.head.weight",
)
_MIMO_V2 = Family(
    name="MiMo-V2",
    outer="model.mtp.layers.{}.",
    block="model.mtp.layers.{}.",
    embed_norm="enorm",
    hidden_norm="hnorm",
    projection="eh_proj",
    final_norm="final_layernorm",
    post_norm="pre_mlp_layernorm",
)
_QWEN = Family(
    name="Qwen3-Next",
    outer="mtp.",
    block="mtp.layers.{}.",
    embed_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    projection="fc",
    final_norm="norm",
    norms_add_one=True,
)
# MiMo's names in Qwen's order; norms are those of the architecture around it.
_SPECULATORS = Family(
    name="speculators",
    outer="mtp_layers.{}.",
    block="mtp_layers.{}.",
    embed_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    projection="input_proj",
    final_norm="final_layernorm",
    embedding="embed_tokens.weight",
    head="lm_head.weight",
)
FAMILIES: Final = (_MIMO, _DEEPSEEK, _MIMO_V2, _QWEN, _SPECULATORS)

# What a block may hold that is no dense layer of queries, keys and values.
_REFUSED_BLOCKS: Final = {
    r"\.(experts|shared_experts?|router|block_sparse_moe)\.|\.mlp\.(gate|shared_expert_gate)\.": (
        "a mixture of experts"
    ),
    r"\.self_attn\.(q_a|q_b|kv_a|kv_b)_": "multi-head latent attention (MLA)",
    r"\.linear_attn\.": "linear attention",
    r"\.self_attn\.(attention_sink_bias|sinks)$": "attention sinks",
    r"_scale(_inv)?$|\.(qweight|qzeros|scales)$": "quantised weights",
}
_INSTEAD: Final = "use a checkpoint whose layers are dense, or the proposers eagle or ngram"


@dataclass(frozen=True, slots=True)
class MtpConfig:
    """The layers of one checkpoint.

    Attributes:
        family: its names and arithmetic.
        indices: of the layers, as the names have them, in order of depth.
        has_embedding, has_head: whether the layers bring copies of their own.
    """

    family: Family
    indices: tuple[int, ...]
    has_embedding: bool
    has_head: bool

    @property
    def num_layers(self) -> int:
        return len(self.indices)

    def outer(self, depth: int, part: str) -> str:
        """Name of one of the parameters around a layer's block."""
        return f"{self.family.outer}{part}.weight".format(self.indices[depth])

    def block(self, depth: int, part: str) -> str:
        """Name of a parameter that blocks call `part`, e.g. `self_attn.q_proj.weight`."""
        part = part.replace("post_attention_layernorm", self.family.post_norm)
        return f"{self.family.block}{part}".format(self.indices[depth])

    def embedding(self, depth: int) -> str:
        assert self.family.embedding is not None, f"{self.family.name} brings no embedding"
        return self.family.embedding.format(self.indices[depth])

    def head(self, depth: int) -> str:
        assert self.family.head is not None, f"{self.family.name} brings no head"
        return self.family.head.format(self.indices[depth])

    def owns(self, name: str) -> bool:
        """Whether a tensor belongs to these layers."""
        family = self.family
        prefixes = {p.format(i) for p in (family.outer, family.block) for i in self.indices}
        return name.startswith(tuple(prefixes))


def read_mtp_config(checkpoint: DraftCheckpoint, *, num_layers: int | None = None) -> MtpConfig:
    """Recognise the layers of a checkpoint.

    Args:
        num_layers: layers of the target whose checkpoint it is; None: a directory of its own, which
            may begin to count anywhere.

    Raises:
        ValueError: there are none, layers of two families, a gap between them, another number than
            config.json says, or a block that is not dense; the message names tensor or key.
    """
    names, path = list(checkpoint.shapes), checkpoint.path
    found = {family.name: family.indices(names) for family in FAMILIES}
    families = [family for family in FAMILIES if found[family.name]]
    if not families:
        raise ValueError(_nothing(checkpoint))
    if len(families) > 1:
        raise ValueError(
            f"{path} holds layers for multi-token prediction of two families, "
            f"{families[0].name} and {families[1].name}; give one of them as a directory of its own"
        )
    [family] = families
    indices = found[family.name]
    first = 0
    if family is _DEEPSEEK:  # which counts on behind the target's layers
        first = indices[0] if num_layers is None else num_layers
    if indices != list(range(first, first + len(indices))):
        raise ValueError(
            f"{path}: layers for multi-token prediction ({family.name}) are {indices}; expected "
            f"all from {first} on"
        )
    _check_count(checkpoint.config, len(indices), path)
    config = MtpConfig(
        family,
        tuple(indices),
        has_embedding=_has_copies(family.embedding, indices, names),
        has_head=_has_copies(family.head, indices, names),
    )
    _check_blocks(config, checkpoint)
    return config


def _has_copies(template: str | None, indices: list[int], names: list[str]) -> bool:
    return template is not None and template.format(indices[0]) in names


def _nothing(checkpoint: DraftCheckpoint) -> str:
    kind = checkpoint.config.get("speculators_model_type", "mtp")
    hint = f"; its speculators_model_type is {kind!r}: use that proposer" if kind != "mtp" else ""
    signs = ", ".join(f"{family.outer}{family.projection}" for family in FAMILIES)
    return (
        f"{checkpoint.path} holds no layers for multi-token prediction; known are {signs}{hint}. "
        "Layers apart from the target are given as SpeculativeConfig('mtp', model=DIRECTORY)"
    )


def _check_count(config: Mapping[str, Any], found: int, path: Path) -> None:
    for key in COUNT_KEYS:
        said = config.get(key)
        if said is not None and said != found:
            raise ValueError(
                f"{path}: config.json says {key}={said!r}, the weights have {found} such layers"
            )


def _check_blocks(config: MtpConfig, checkpoint: DraftCheckpoint) -> None:
    for name in checkpoint.shapes:
        for pattern, what in _REFUSED_BLOCKS.items():
            if config.owns(name) and re.search(pattern, name):
                raise ValueError(
                    f"{checkpoint.path}: {name} shows {what} in a layer for multi-token "
                    f"prediction, which is not supported; {_INSTEAD}"
                )
