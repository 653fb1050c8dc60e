"""What a draft is: its kind, its sizes and flags, and the defaults that depend on the target.

Owns the checks of these, before anything is computed. Knows neither modules nor files.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Literal, get_args

from proposers.training.heads import Eagle3Flags
from proposers.training.target import LayerSizes

Kind = Literal["eagle3", "eagle1", "mtp", "draft_model"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftConfig:
    """What is trained; None: a default that depends on the target."""

    kind: Kind
    taps: tuple[int, ...] | None = None  # eagle3: layers whose inputs it sees
    draft_vocab: int | None = None  # eagle3: ids that it can draft; None: all
    flags: Eagle3Flags = field(default_factory=Eagle3Flags)  # eagle3
    layers: int | None = None  # draft_model
    hidden: int | None = None  # draft_model
    intermediate: int | None = None  # of the MLP
    kv_heads: int | None = None  # key and value heads of a layer
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of the checkpoint

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r}: expected one of {', '.join(KINDS)}")
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError(f"dtype={self.dtype!r}: expected bfloat16 or float32")
        of_kind = {
            "eagle3": ("taps", "draft_vocab"),
            "draft_model": ("layers", "hidden"),
        }
        for kind, names in of_kind.items():
            for name in names:
                if kind != self.kind and getattr(self, name) is not None:
                    raise ValueError(f"{name}={getattr(self, name)}: only kind {kind} has it")
        defaults = asdict(Eagle3Flags())
        for name, value in asdict(self.flags).items():
            if self.kind != "eagle3" and value != defaults[name]:
                raise ValueError(f"{name}={value}: only kind eagle3 has it")
        for name in ("layers", "hidden", "intermediate", "kv_heads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: expected at least 1")

    def resolved_taps(self, num_layers: int) -> tuple[int, ...]:
        """Whose residual streams the draft reads; none but for eagle3.

        Raises:
            ValueError: the target has no such layer, or they do not ascend, as readers of the
                format require.
        """
        if self.kind != "eagle3":
            return ()
        taps = default_taps(num_layers) if self.taps is None else self.taps
        ascend = all(low < high for low, high in pairwise(taps))
        if not taps or not ascend or taps[0] < 0 or taps[-1] > num_layers:
            raise ValueError(
                f"taps={list(taps)}: expected layers from 0 to {num_layers}, in ascending order"
            )
        return taps

    def sizes(self, target: LayerSizes) -> LayerSizes:
        """Of the draft's layers. A head is as wide as the target; a draft model's heads keep their
        size and their number follows its width.

        Raises:
            ValueError: a width that is no multiple of the head size, or heads that do not divide.
        """
        hidden = self.hidden or target.hidden_size
        heads, kv_heads = target.num_heads, self.kv_heads
        if self.hidden is not None:
            heads, rest = divmod(hidden, target.head_dim)
            if rest or not heads:
                raise ValueError(
                    f"hidden={hidden}: expected a multiple of the target's head size, "
                    f"{target.head_dim}"
                )
        if kv_heads is None:
            kv_heads = max(n for n in range(1, target.num_kv_heads + 1) if heads % n == 0)
        if heads % kv_heads:
            raise ValueError(f"kv_heads={kv_heads}: expected a divisor of the {heads} query heads")
        inner = target.intermediate_size if self.hidden is None else 3 * hidden
        return replace(
            target,
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=kv_heads,
            intermediate_size=self.intermediate or inner,
        )


def default_taps(num_layers: int) -> tuple[int, ...]:
    """EAGLE-3's choice, the inputs of layers 2, N // 2 and N - 3; a spread where N is small."""
    taps = (2, num_layers // 2, num_layers - 3)
    if taps[0] < taps[1] < taps[2]:
        return taps
    return tuple(dict.fromkeys((num_layers // 4, num_layers // 2, num_layers - num_layers // 4)))
