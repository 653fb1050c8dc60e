"""Which attention serves the target: by capability, and where two could, by measurement.

Owns the rule and the words for its reason, which the capture report prints: nothing is chosen
silently. A measured choice is remembered by machine, versions and sizes, so that the same
configuration computes the same bits at the next start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """An attention backend by name, and why it."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"attention {self.name}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """Two backends that could serve, and how to tell which is faster.

    Attributes:
        certain: the one that always can.
        other: the one that can where `check` does not object.
        check: raises ValueError, saying why `other` cannot.
        measure: seconds of a step's attention by name.
        remembered: an earlier choice of this machine and these sizes; None: there is none.
        remember: keeps one.
    """

    certain: str
    other: str
    check: Callable[[], None]
    measure: Callable[[], Mapping[str, float]]
    remembered: Callable[[], Choice | None]
    remember: Callable[[Choice], None]


def choose(asked: str, contest: Contest) -> Choice:
    """The backend that serves.

    Args:
        asked: `auto`, or a backend's name.

    Raises:
        ValueError: the one asked for cannot serve here.
    """
    names = (contest.certain, contest.other)
    if asked != "auto":
        if asked not in names:
            raise ValueError(f"attention={asked!r}: allowed here are auto, {', '.join(names)}")
        if asked == contest.other:
            _check(contest)
        return Choice(asked, "asked for")
    try:
        contest.check()
    except ValueError as error:
        return Choice(contest.certain, f"{contest.other} cannot serve ({error})")
    found = contest.remembered()
    if found is None:
        found = _measured(contest)
        contest.remember(found)
    return found


def _check(contest: Contest) -> None:
    try:
        contest.check()
    except ValueError as error:
        raise ValueError(f"attention={contest.other!r}: {error}") from error


def _measured(contest: Contest) -> Choice:
    seconds = contest.measure()
    best = min((contest.certain, contest.other), key=lambda name: seconds[name])
    figures = ", ".join(f"{name} {1e6 * seconds[name]:.1f} us" for name in sorted(seconds))
    return Choice(best, f"measured over the table's cells: {figures}")
