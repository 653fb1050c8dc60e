"""What the registry can say about a proposer without building it: the rows of the support matrix.

Owns ProposerInfo, its options and their resolution against what a user gave. Knows no concrete
proposer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from proposers.base import Proposer, Runtime

Status = Literal["built", "testing", "planned", "unsupported"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionInfo:
    """One option of a proposer: its key, default and a sentence on what it does."""

    name: str
    default: object
    doc: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ProposerInfo:
    """Declared properties of a proposer; those of a built one equal the flags of its instances."""

    name: str
    summary: str
    kind: Literal["host", "device"]
    graph_safe: bool = False
    needs_hidden_states: bool = False
    produces_probs: bool = False
    status: Status = "built"
    # why a planned or unsupported one is refused, and what to use instead
    reason: str = ""
    options: tuple[OptionInfo, ...] = ()

    def resolve(self, given: Mapping[str, object]) -> dict[str, object]:
        """Defaults overlaid with what was given. Raises ValueError for a key that is no option."""
        allowed = {option.name: option.default for option in self.options}
        for key in given:
            if key not in allowed:
                names = ", ".join(allowed) or "none"
                raise ValueError(
                    f"proposer {self.name!r} has no option {key!r}; its options are: {names}"
                )
        return {**allowed, **given}


ProposerFactory = Callable[[Mapping[str, object], Runtime], Proposer]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProposerSpec:
    """One registration: what it is and how to build it. Entry points name an instance of this."""

    info: ProposerInfo
    factory: ProposerFactory


def int_option(
    proposer: str, options: Mapping[str, object], key: str, *, low: int, high: int
) -> int:
    """options[key] as an int in [low, high]. Raises ValueError naming key, value and range."""
    value = options[key]
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(
            f"proposer {proposer!r}: {key}={value!r} is not allowed; "
            f"give an integer from {low} to {high}"
        )
    return value
