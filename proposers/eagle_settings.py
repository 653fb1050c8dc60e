"""Settings of an EAGLE head: typed look-up in its config.json, and what is refused by name.

A key may stand at the top level or in `eagle_config`, as NVIDIA and SpecForge write it; both are
read alike. A setting that changes the arithmetic and that nobody reads is refused, as are heads of
another kind. Knows no meaning of a value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

NESTED: Final = "eagle_config"
AUX_LAYERS: Final = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class _Kind:
    """Heads of another kind: what shows that it is one, and what to use instead."""

    name: str
    said: str  # pattern of a class name or a `speculators_model_type`
    keys: tuple[str, ...]
    instead: str


_OTHER_KINDS = (
    _Kind("DFlash", "d-?flash", ("dflash_config",), "an EAGLE-3 head of the same target"),
    _Kind("DSpark", "d-?spark", ("markov_rank",), "an EAGLE-3 head of the same target"),
    _Kind(
        "P-EAGLE",
        "p-?eagle",
        ("mask_token_id", "ptd_token_id", "parallel_drafting"),
        "an EAGLE-3 head, which drafts token by token",
    ),
    _Kind("Medusa", "medusa", ("medusa_num_heads",), "an EAGLE-3 head of the same target"),
    _Kind(
        "MTP",
        "mtp|nextn",
        ("num_nextn_predict_layers", "mtp_num_hidden_layers"),
        "proposer 'mtp'",
    ),
)

# What is read; the layer's own settings are judged by the engine.
_READ = {
    *("draft_vocab_size", "target_hidden_size", AUX_LAYERS, "num_aux_hidden_states"),
    *("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output"),
    *("use_aux_hidden_state", "bias", NESTED),
    *("speculators_config", "speculators_model_type", "speculators_version"),
    "transformer_layer_config",
}
# What changes the arithmetic, and the values under which it does nothing. Null passes.
_INERT: Mapping[str, tuple[object, ...]] = {
    "use_mtp_layernorm": (False,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (1,),
    "parallel_draft_heads_num_layers": (0, 1),
    "eagle_decoder_type": ("llama",),
    "has_lm_head": (True, False),  # the weights tell
    "embed_requires_grad": (True, False),  # of training
    "add_para_norm": (False,),
    "skip_prenorm": (True,),
    "skip_output_norm": (True,),
}
# Top-level keys with such a name are of a head, not of its layers.
_TELLING = re.compile(
    r"norm|eagle|residual|hidden_state|aux_|target_layer|(^|_)fc(_|$)|parallel|mask"
)
_OF_LAYERS = {"rms_norm_eps", "layer_norm_eps", "norm_eps", "qk_layernorm", "use_qk_norm"}


class Settings:
    """The contents of a head's config.json.

    Raises:
        ValueError: a head of another kind; the message names the key and what to use instead.
    """

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        nested = raw.get(NESTED)
        if nested is not None and not isinstance(nested, Mapping):
            raise refusal(NESTED, nested, "an object")
        self._nested: Mapping[str, Any] = nested or {}
        self._refuse_other_kinds()

    def get(self, key: str) -> Any:
        """The value; None where it is absent or null."""
        nested, top = self._nested.get(key), self.raw.get(key)
        if nested is not None and top is not None and nested != top:
            raise refusal(key, top, f"{nested!r}, as {NESTED} says, or one of the two alone")
        return top if nested is None else nested

    def is_nested(self, key: str) -> bool:
        """Whether a key stands in `eagle_config` alone."""
        return self._nested.get(key) is not None and self.raw.get(key) is None

    def count(self, key: str) -> int | None:
        """A positive integer, if any."""
        value = self.get(key)
        return None if value is None else count(key, value)

    def flag(self, key: str, *, default: bool = False) -> bool:
        value = self.get(key)
        if value is not None and type(value) is not bool:
            raise refusal(key, value, "true or false")
        return default if value is None else bool(value)

    def layer_settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Without those that are of the head."""
        return {key: value for key, value in given.items() if key not in _READ}

    def refuse_unknown(self, version: int) -> None:
        """Refuse what is not read and may change the arithmetic of EAGLE-`version`."""
        has_norms = (version == 3,)
        inert: dict[str, tuple[object, ...]] = {
            **_INERT,
            "use_input_layernorm_in_first_layer": has_norms,
            "use_last_layernorm": has_norms,
        }
        telling = [
            (key, value)
            for key, value in self.raw.items()
            if _TELLING.search(key) and key not in _OF_LAYERS
        ]
        for key, value in [*telling, *self._nested.items()]:
            allowed = inert.get(key, (False, 0))
            if value is not None and key not in _READ and value not in allowed:
                raise refusal(key, value, " or ".join(map(repr, allowed)))

    def _refuse_other_kinds(self) -> None:
        names = ("speculators_model_type", "architectures")
        said = {key: self.raw.get(key) for key in names}
        for kind in _OTHER_KINDS:
            keys = [key for key in kind.keys if self.raw.get(key)]
            keys += [key for key in names if re.search(kind.said, str(said[key]), re.IGNORECASE)]
            if keys:
                raise ValueError(
                    f"config.json: {keys[0]}={self.raw[keys[0]]!r} is of another kind of head, "
                    f"{kind.name}, which proposer 'eagle' cannot run; use {kind.instead}"
                )


def count(key: str, value: object) -> int:
    """The value, if it is a positive integer."""
    if type(value) is not int or value < 1:
        raise refusal(key, value, "a positive integer")
    return value


def refusal(key: str, value: object, allowed: str) -> ValueError:
    """The error for a setting, with its value and what is allowed."""
    return ValueError(f"config.json: {key}={value!r} is not supported; allowed: {allowed}")
