"""SamplingDefaults: what a checkpoint recommends for sampling, used where somebody asks for it.

Owns which keys of generation_config.json and of GGUF metadata are meant, and what their absence
means. Gets parsed values, and looks at none of them before it is asked: a checkpoint with a bad one
runs. Which values are allowed is `SamplingParams`' to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphengine.sampling.params import SamplingParams

_HF = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
_GGUF = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_OF_A_DRAW = ("temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingDefaults:
    """Fields of `SamplingParams` that a checkpoint sets.

    Attributes:
        source: the file, the beginning of every message.
        do_sample: as it stands in the file. Without it decoding is greedy, and no field that
            shapes a draw is looked at; with it an absent temperature is 1.
        entries: (field, key in the file, value as it stands there), each field at most once.
    """

    source: str = ""
    do_sample: Any = None
    entries: tuple[tuple[str, str, Any], ...] = ()

    @property
    def fields(self) -> frozenset[str]:
        """Names of the fields that the file has a value for."""
        return frozenset(field for field, _, _ in self.entries)

    def params(self, **changes: Any) -> SamplingParams:
        """The recommended parameters; `changes` are fields of `SamplingParams` that win.

        Raises:
            ValueError: a value of the file that counts and that no change replaces is not allowed;
                the message names file, key and value. Or a change is not allowed.
        """
        if not isinstance(self.do_sample, bool | None):
            raise ValueError(f"{self.source}: do_sample={self.do_sample!r}: expected true or false")
        kept: dict[str, Any] = {"temperature": 1.0} if self.do_sample else {}
        for field, key, value in self.entries:
            if field in changes or (field in _OF_A_DRAW and not self.do_sample):
                continue
            self._check(field, key, value)
            kept[field] = value
        return SamplingParams(**kept | changes)

    def _check(self, field: str, key: str, value: Any) -> None:
        try:
            SamplingParams(**{field: value})
        except ValueError as error:
            raise ValueError(
                f"{self.source}: {key}={value!r} cannot be a default ({error}); correct the file, "
                f"or give {field} yourself"
            ) from error


def hf_sampling_defaults(source: str, generation: Mapping[str, Any]) -> SamplingDefaults:
    """What generation_config.json recommends, as transformers reads it, null being absent.

    transformers' own top-k of 50, which holds where the file names none, is left out.
    """
    entries = _entries(generation, _HF)
    return SamplingDefaults(source=source, do_sample=generation.get("do_sample"), entries=entries)


def gguf_sampling_defaults(source: str, metadata: Mapping[str, Any]) -> SamplingDefaults:
    """What a GGUF file recommends: it has no switch, so a key that is there is meant to be used."""
    entries = _entries(metadata, _GGUF)
    draws = any(field in _OF_A_DRAW for field, _, _ in entries)
    return SamplingDefaults(source=source, do_sample=draws, entries=entries)


def _entries(
    values: Mapping[str, Any], keys: Mapping[str, str]
) -> tuple[tuple[str, str, Any], ...]:
    found = ((field, key, values.get(key)) for key, field in keys.items())
    return tuple(entry for entry in found if entry[2] is not None)
