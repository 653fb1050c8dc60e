"""What `check-lossless` found, as tables on a screen.

Owns the layout. Takes no measurement, and leaves the verdict to the checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.markup import escape
from rich.table import Table

from graphengine.bench.identity import Flip, IdentityCheck, Twin
from graphengine.bench.laws import LawCheck, Place
from graphengine.bench.serve import Stream


def identity_table(check: IdentityCheck) -> Table:
    """One row a prompt group."""
    groups: dict[str, list[Twin]] = {}
    for twin in check.twins:
        groups.setdefault(twin.job.asked.group, []).append(twin)
    table = _table("same tokens with speculation off and on", "group", right=_COUNTS)
    for name, twins in groups.items():
        num_identical = sum(twin.flip is None for twin in twins)
        table.add_row(
            escape(name),
            str(len(twins)),
            *_figures([twin.on for twin in twins]),
            f"{num_identical} of {len(twins)}",
        )
    return table


_COUNTS = ("streams", "tokens", "drafted", "accepted", "identical")


def flip_table(flips: Sequence[Flip], decode: Callable[[int], str]) -> Table:
    """Every flip. `decode`: the text of a token id."""

    def shown(flip: Flip, value: int | str | None) -> str:
        if flip.what == "token":
            return "ended" if value is None else escape(f"{value} {decode(int(value))!r}")
        return escape(repr(value))

    table = _table("where they differ first", "prompt", right=("sample", "seed"))
    for name in ("differs", "off", "on"):
        table.add_column(name)
    table.add_column("top-2 gap", justify="right")
    for flip in flips:
        place = flip.what if flip.position is None else f"{flip.what} {flip.position}"
        gap = "-" if flip.gap is None else f"{flip.gap:.3g}"
        sides = [shown(flip, value) for value in (flip.off, flip.on)]
        table.add_row(escape(flip.prompt_id), str(flip.sample), str(flip.seed), place, *sides, gap)
    return table


def law_table(check: LawCheck) -> Table:
    """One row a prompt: its samples, and the test of it that comes nearest to a difference."""
    groups: dict[int, list[Place]] = {}
    for place in check.places:
        groups.setdefault(place.number, []).append(place)
    figures = ("samples", "drafted", "accepted", "judged there", "tests")
    table = _table("same distribution with speculation off and on", "prompt", right=figures)
    for name in ("nearest", "variation", "p", "p (Holm)"):
        table.add_column(name, justify="right")
    for number, places in groups.items():
        streams = check.on.of(number)
        nearest = min(places, key=lambda place: place.p)
        _, drafted, accepted = _figures(streams)
        table.add_row(
            escape(nearest.prompt_id),
            str(len(streams)),
            drafted,
            accepted,
            str(sum(place.num_drafts for place in places if len(place.positions) == 1)),
            f"{sum(place.num_categories > 1 for place in places)} of {len(places)}",
            place_name(nearest),
            f"{nearest.total_variation:.3f}",
            f"{nearest.p:.2g}",
            f"{nearest.p_adjusted:.2g}",
        )
    return table


def place_line(place: Place) -> str:
    """A test that found a difference."""
    worst = max(
        zip(place.tokens, place.off, place.on, strict=True),
        key=lambda one: abs(one[1] / sum(place.off) - one[2] / sum(place.on)),
    )
    return escape(
        f"{place.prompt_id}, {place_name(place)}: p {place.p_adjusted:.2g} after Holm, total "
        f"variation {place.total_variation:.3f}; most of it by {list(worst[0])}, which came "
        f"{worst[1]} times of {sum(place.off)} off and {worst[2]} of {sum(place.on)} on"
    )


def place_name(place: Place) -> str:
    """`token 2`, or `tokens 0, 1` where they are taken together."""
    several = "s" if len(place.positions) > 1 else ""
    return f"token{several} {', '.join(map(str, place.positions))}"


def _figures(streams: Sequence[Stream]) -> tuple[str, str, str]:
    tokens = sum(len(stream.token_ids) for stream in streams)
    drafted = sum(stream.num_draft_tokens for stream in streams)
    accepted = sum(stream.num_accepted_tokens for stream in streams)
    return str(tokens), str(drafted), str(accepted)


def _table(title: str, first: str, *, right: Sequence[str]) -> Table:
    table = Table(title=title)
    table.add_column(first)
    for name in right:
        table.add_column(name, justify="right")
    return table
