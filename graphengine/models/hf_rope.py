"""From the rotary settings of a config.json to a `RopeConfig`, in either of their two spellings.

Older files have `rope_theta` beside a `rope_scaling` object; newer ones have all of it in
`rope_parameters`. Keys that a kind does not read are refused by name.
"""

from collections.abc import Mapping
from typing import Any

from graphengine.models.config import ROPE_KINDS, RopeConfig

_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
    ),
}
_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


def read_rope(raw: Mapping[str, Any], *, default_theta: float, max_positions: int) -> RopeConfig:
    """Build the rotary config from the contents of config.json.

    Args:
        default_theta: The base where the rotary object names none: config.json's own `rope_theta`,
            or the architecture's default.
        max_positions: max_position_embeddings, which an absent original length means.
    """
    given = {k: v for k, v in _rope_object(raw).items() if v is not None}
    kind = _kind(given)
    theta = _number("rope_theta", given.pop("rope_theta", default_theta))
    partial = given.pop("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise ValueError(
            f"config.json: partial_rotary_factor={partial!r} is not implemented; allowed: 1.0"
        )
    missing = [key for key in _REQUIRED[kind] if key not in given]
    if missing:
        raise ValueError(f"config.json: rope kind {kind!r} needs {', '.join(missing)}")
    fields: dict[str, Any] = {k: _number(k, given.pop(k)) for k in _NUMBERS[kind] if k in given}
    if kind in ("llama3", "yarn"):
        # The top-level key wins over the one in the rotary object, as in transformers.
        inner = given.pop("original_max_position_embeddings", max_positions)
        outer = raw.get("original_max_position_embeddings")
        original = inner if outer is None else outer
        if type(original) is not int:
            raise ValueError(
                "config.json: rope original_max_position_embeddings must be an integer, got "
                f"{original!r}"
            )
        fields["original_max_position_embeddings"] = original
    if kind == "yarn" and "truncate" in given:
        fields["truncate"] = _flag("truncate", given.pop("truncate"))
    if given:
        allowed = ["rope_type", "rope_theta", *_NUMBERS[kind]]
        raise ValueError(
            f"config.json: rope settings {given!r} are not implemented for rope kind {kind!r}; it "
            f"reads {', '.join(allowed)}"
        )
    return RopeConfig(kind=kind, theta=theta, **fields)


def _rope_object(raw: Mapping[str, Any]) -> dict[str, Any]:
    old, new = raw.get("rope_scaling"), raw.get("rope_parameters")
    for key, value in (("rope_scaling", old), ("rope_parameters", new)):
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"config.json: {key} must be an object, got {value!r}")
    if old and new and old != new:
        raise ValueError(
            f"config.json: rope_scaling={old!r} and rope_parameters={new!r} disagree; keep one of "
            "them"
        )
    return dict(old or new or {})


def _kind(given: dict[str, Any]) -> str:
    """Take the kind, spelled `rope_type` or `type`, out of `given`."""
    old, new = given.pop("type", None), given.pop("rope_type", None)
    if old is not None and new is not None and old != new:
        raise ValueError(
            f"config.json: rope_type={new!r} and type={old!r} disagree; keep one of them"
        )
    kind = new or old or "default"
    if kind not in ROPE_KINDS:
        raise ValueError(
            f"config.json: rope kind {kind!r} is not supported; allowed: {', '.join(ROPE_KINDS)}"
        )
    return str(kind)


def _number(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"config.json: rope {key} must be a number, got {value!r}")
    return float(value)


def _flag(key: str, value: object) -> bool:
    if type(value) is not bool:
        raise ValueError(f"config.json: rope {key} must be true or false, got {value!r}")
    return value
