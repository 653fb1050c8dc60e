"""Verdicts: what a check of losslessness says in the end.

Owns the rule that a run in which no draft was judged has shown nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the promise was seen to hold, and the line that says so."""

    holds: bool
    text: str


def nothing_drafted(where: str) -> Verdict:
    """Of a run without a single draft `where` it looked: plain decoding compared with itself."""
    return Verdict(
        False,
        f"nothing was drafted {where}: both sides decoded plainly, which shows nothing; try "
        "prompts whose answers the proposer can guess, or longer answers",
    )
