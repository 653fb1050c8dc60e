"""What the registry can say about a proposer without building it: the rows of the support matrix.

Owns ProposerInfo, its options and the check of what a user gave: once, when a configuration is
made, so that a bad value costs no load of weights. Knows no concrete proposer.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from proposers.base import Proposer, Runtime
from proposers.device import DraftPlan, DraftSite

Status = Literal["built", "testing", "unsupported"]


@dataclass(frozen=True, slots=True)
class Rule:
    """Which values an option may have."""

    accepts: Callable[[object], bool]
    allowed: str  # in words, to follow "give"


def integers(low: int, high: int) -> Rule:
    """Integers in [low, high]; a bool is none."""
    return Rule(
        lambda value: (
            isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        ),
        f"an integer from {low} to {high}",
    )


def numbers(low: float, high: float) -> Rule:
    """Integers and floats in [low, high]; a bool is neither."""
    return Rule(
        lambda value: (
            isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        ),
        f"a number from {low} to {high}",
    )


def none_or(rule: Rule) -> Rule:
    """None, or what the rule accepts."""
    return Rule(lambda value: value is None or rule.accepts(value), f"None or {rule.allowed}")


BOOLEAN = Rule(lambda value: isinstance(value, bool), "True or False")
ANYTHING = Rule(lambda value: True, "anything")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionInfo:
    """One option of a proposer: its key, default, a sentence on what it does, and its values."""

    name: str
    default: object
    doc: str
    rule: Rule = ANYTHING


@dataclass(frozen=True, kw_only=True, slots=True)
class ProposerInfo:
    """Declared properties of a proposer; those of a built one equal the flags of its instances."""

    name: str
    summary: str
    kind: Literal["host", "device"]
    # the version of the contract (`base.INTERFACE`) that it was written for, as a literal: a third
    # party's is refused where it is another. "": this package's own
    interface: str = ""
    graph_safe: bool = False
    needs_hidden_states: bool = False
    produces_probs: bool = False
    # whether `propose` reads the tokens of the step before on the host; if not, it can draft while
    # that step is under way (`ProposeInputs.num_in_flight`)
    needs_tokens: bool = True
    # the longest match that it finds with its default options, where it says how long they are
    # (`Draft.match_lengths`), so that it may override a model; 0: it does not match
    longest_match: int = 0
    # whether it takes the path of a checkpoint (`SpeculativeConfig.model`)
    model: Literal["none", "optional", "required"] = "none"
    status: Status = "built"
    # why an unsupported one is refused
    reason: str = ""
    # names of what serves in its place
    instead: tuple[str, ...] = ()
    options: tuple[OptionInfo, ...] = ()
    # for rules that tie options together: called with all of them, each allowed by its own rule;
    # raises option_error()
    check: Callable[[Mapping[str, object]], None] | None = None

    def resolve(self, given: Mapping[str, object]) -> dict[str, object]:
        """Every option: its default, or what was given.

        Raises ValueError for a key that is no option, or a value that is not allowed.
        """
        resolved = {option.name: option.default for option in self.options}
        for key in given:
            if key not in resolved:
                names = ", ".join(resolved) or "none"
                raise ValueError(
                    f"proposer {self.name!r} has no option {key!r}; its options are: {names}"
                )
        resolved.update(given)
        for option in self.options:
            value = resolved[option.name]
            if not option.rule.accepts(value):
                raise option_error(self.name, option.name, value, option.rule.allowed)
        if self.check is not None:
            self.check(resolved)
        return resolved


def option_error(proposer: str, key: str, value: object, allowed: str) -> ValueError:
    """The refusal of an option's value, naming proposer, key, value and what is allowed."""
    return ValueError(f"proposer {proposer!r}: {key}={reprlib.repr(value)}: expected {allowed}")


ProposerFactory = Callable[[Mapping[str, object], Runtime], Proposer]
"""Called with what `ProposerInfo.resolve` returned: every option is there and has been checked. A
factory raises ValueError for what only the runtime can tell, e.g. an id outside the vocabulary."""

DraftOpener = Callable[[Mapping[str, object], DraftSite], DraftPlan]
"""As a factory, but called before any weight is read: it opens checkpoints by their headers and
says what the proposer will need. Raises ValueError for a checkpoint that does not fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProposerSpec:
    """One registration: what it is and how to build it. Entry points name an instance of this.

    Either `factory`, or `open` for a proposer that carries a model.
    """

    info: ProposerInfo
    factory: ProposerFactory | None = None
    open: DraftOpener | None = None

    def __post_init__(self) -> None:
        assert (self.factory is None) != (self.open is None), (
            f"proposer {self.info.name!r}: give either factory or open"
        )
