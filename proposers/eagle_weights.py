"""EagleWeights: the tensors of an EAGLE head beside its layers, and their names in a checkpoint.

Owns the table from draft ids to the target's, and the check of it. What a checkpoint leaves out
(embedding, output head) is the target's. Knows configs, not the forward.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from proposers.checkpoint import DraftCheckpoint
from proposers.device import Architecture
from proposers.eagle_config import EagleConfig

Tensor = torch.Tensor

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
_QUANTISED = ("scale", "qweight", "qzeros", "zero_point", "g_idx")


def canonical_names(checkpoint: DraftCheckpoint) -> dict[str, str]:
    """Name as in the `speculators` layout -> name in the checkpoint.

    Raises:
        ValueError: two tensors of one name, or a quantised head.
    """
    names: dict[str, str] = {}
    for stored in checkpoint.shapes:
        name = stored.removeprefix("model.")
        if name.startswith("midlayer."):
            name = "layers.0." + name.removeprefix("midlayer.")
        if name in names:
            raise ValueError(f"{checkpoint.path} holds both {names[name]} and {stored}")
        if any(part in name.rsplit(".", 1)[-1] for part in _QUANTISED):
            raise ValueError(f"{checkpoint.path} holds {stored}: quantised heads are not supported")
        names[name] = stored
    return names


@dataclass(slots=True)
class EagleWeights:
    """Parameters, None where there is none; matrices in the model dtype, norms and bias fp32."""

    fc: Tensor | None  # EAGLE-1: [hidden, 2 hidden], EAGLE-3: [hidden, taps * target's hidden]
    fc_bias: Tensor | None  # [hidden]
    input_norm: Tensor | None  # [taps * target's hidden], in front of fc
    fc_norms: Tensor | None  # [taps, target's hidden]; multiplied into fc once loaded
    hidden_norm: Tensor | None  # [hidden]
    norm: Tensor | None  # [hidden], the final one
    embed: Tensor | None  # [vocab, hidden]; None: the target's
    head: Tensor | None  # [draft_vocab, hidden]; None: the target's

    @classmethod
    def allocate(
        cls,
        config: EagleConfig,
        architecture: Architecture,
        target: Architecture,
        names: Collection[str],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> EagleWeights:
        """Empty parameters.

        Args:
            names: of the checkpoint's tensors, canonical: what is there of embedding and head.
        """
        hidden, is_3 = architecture.hidden_size, config.version == 3
        columns = len(config.taps) * target.hidden_size if config.projects_taps else 2 * hidden

        def matrix(rows: int, columns: int, *, exists: bool) -> Tensor | None:
            return torch.empty(rows, columns, dtype=dtype, device=device) if exists else None

        def norm(*shape: int, exists: bool) -> Tensor | None:
            return torch.empty(shape, dtype=torch.float32, device=device) if exists else None

        num_columns = config.draft_vocab_size or target.vocab_size
        return cls(
            fc=matrix(hidden, columns, exists=config.has_fc),
            fc_bias=norm(hidden, exists=config.has_fc and config.fc_bias),
            input_norm=norm(columns, exists=config.norm_before_fc),
            fc_norms=norm(len(config.taps), target.hidden_size, exists=config.fc_norm),
            hidden_norm=norm(hidden, exists=is_3),
            norm=norm(hidden, exists=is_3),
            embed=matrix(config.vocab_size, hidden, exists=EMBEDDING in names),
            head=matrix(num_columns, hidden, exists=HEAD in names),
        )

    def destinations(self) -> dict[str, Tensor]:
        """Canonical name -> where it goes, of all that the head has."""
        named = {
            "fc.weight": self.fc,
            "fc.bias": self.fc_bias,
            "input_norm.weight": self.input_norm,
            "layers.0.hidden_norm.weight": self.hidden_norm,
            "norm.weight": self.norm,
            EMBEDDING: self.embed,
            HEAD: self.head,
        }
        named |= {f"fc_norm.{i}.weight": one for i, one in enumerate(_rows(self.fc_norms))}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.destinations().values())


def check(
    checkpoint: DraftCheckpoint, weights: EagleWeights, layers: Sequence[Mapping[str, Tensor]]
) -> None:
    """Hold a checkpoint's headers to what a head must have.

    Args:
        layers: parameters of each layer, by their names within it; on the meta device, as weights.

    Raises:
        ValueError: a parameter that is missing, has another shape, or has no place.
    """
    checkpoint.check(_stored(checkpoint, weights, layers), ignores=_is_ignored)


def load(
    checkpoint: DraftCheckpoint, weights: EagleWeights, layers: Sequence[Mapping[str, Tensor]]
) -> None:
    """Read all weights; arguments and errors as those of `check`.

    The gains of `fc_norm` go into fc, whose columns they scale: what is left is one norm for all
    taps alike.
    """
    checkpoint.load(_stored(checkpoint, weights, layers), ignores=_is_ignored)
    if weights.fc is not None and weights.fc_norms is not None:
        weights.fc.copy_(weights.fc.float() * weights.fc_norms.flatten())


def _stored(
    checkpoint: DraftCheckpoint, weights: EagleWeights, layers: Sequence[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Name in the checkpoint -> where it goes."""
    names, wanted = canonical_names(checkpoint), weights.destinations()
    for index, parts in enumerate(layers):
        wanted |= {f"layers.{index}.{name}": tensor for name, tensor in parts.items()}
    if weights.hidden_norm is None:  # EAGLE-1, whose attention reads what the projection gives
        del wanted["layers.0.input_layernorm.weight"]
    return {names.get(name, name): tensor for name, tensor in wanted.items()}


def _rows(matrix: Tensor | None) -> Sequence[Tensor]:
    return () if matrix is None else tuple(matrix)


def _is_ignored(stored: str) -> bool:
    """Tables, which are read apart, and what is left over from training."""
    name = stored.removeprefix("model.")
    is_left_over = name.startswith("verifier_") or name.endswith("rotary_emb.inv_freq")
    return name in ("d2t", "t2d") or is_left_over


def draft_tokens(
    checkpoint: DraftCheckpoint,
    names: Mapping[str, str],
    *,
    num_columns: int,
    vocab_size: int,
) -> Tensor | None:
    """The target's id of each column of the logits, from the table `d2t` of offsets.

    Args:
        names: `canonical_names` of the checkpoint.
        num_columns: of the logits.
        vocab_size: of the target.

    Returns:
        int32 [num_columns]: i + d2t[i]; None: columns are ids.

    Raises:
        ValueError: a table that is missing, or that cannot be one.
    """
    path = checkpoint.path
    if num_columns == vocab_size:
        return None  # no table is read where all ids are there
    if "d2t" not in names:
        raise ValueError(
            f"{path} has no d2t, but draft_vocab_size={num_columns} is not the target's vocabulary "
            f"of {vocab_size}: nothing says which ids the head drafts"
        )
    table = checkpoint.read(names["d2t"])
    if table.is_floating_point() or table.shape != (num_columns,):
        raise ValueError(
            f"{path}: d2t is {table.dtype} {list(table.shape)}; expected integers "
            f"[{num_columns}], as draft_vocab_size says"
        )
    ids = torch.arange(num_columns) + table.long()
    fault = _fault(ids, vocab_size)
    if fault is not None:
        if _fault(table.long(), vocab_size) is None:
            fault += "; d2t looks like absolute ids: expected offsets, target id = i + d2t[i]"
        raise ValueError(f"{path}: d2t maps {fault}")
    if "t2d" in names:
        flags = checkpoint.read(names["t2d"])
        if not torch.equal(flags.nonzero().flatten(), ids.sort().values):
            raise ValueError(
                f"{path}: d2t and t2d disagree: d2t maps {num_columns} drafts to other ids than "
                f"the {int(flags.count_nonzero())} that t2d marks"
            )
    return ids.to(torch.int32)


def _fault(ids: Tensor, vocab_size: int) -> str | None:
    """Why these cannot be the target's ids of distinct columns; None: they can."""
    outside = ((ids < 0) | (ids >= vocab_size)).nonzero().flatten().tolist()
    if outside:
        draft = outside[0]
        return f"draft {draft} to {int(ids[draft])}, outside the target's ids 0..{vocab_size - 1}"
    values, counts = ids.unique(return_counts=True)
    if int(counts.max()) > 1:
        return f"{int(counts.max())} drafts to id {int(values[counts.argmax()])}"
    return None
