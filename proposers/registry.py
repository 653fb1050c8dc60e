"""Names of draft sources: which exist and which are refused; how to build one.

Owns the registrations and the entry-point group through which third parties add theirs. The only
place that knows concrete proposers; adding one is its file and one line here.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

from proposers.base import INTERFACE, Proposer, Runtime
from proposers.device import DraftPlan, DraftSite, ModelProposer
from proposers.info import ProposerInfo, ProposerSpec
from proposers.override import OverridingProposer
from proposers.refused import REFUSED

ENTRY_POINT_GROUP = "graphengine.proposers"
"""An entry point of this group is named like the proposer and points to its ProposerSpec."""

# Registered as a third party's are, and imported when somebody asks for them.
_BUILTIN = {
    "ngram": "proposers.ngram:SPEC",
    "suffix": "proposers.suffix:SPEC",
    "successor": "proposers.successor:SPEC",
    "draft_model": "proposers.draft_model:SPEC",
    "eagle": "proposers.eagle:SPEC",
    "mtp": "proposers.mtp:SPEC",
}
_SCRIPTED = {
    "mock-oracle": "proposers.mock_specs:ORACLE",
    "mock-junk": "proposers.mock_specs:JUNK",
    "mock-accept-exactly": "proposers.mock_specs:ACCEPT_EXACTLY",
    "mock-ragged": "proposers.mock_specs:RAGGED",
    "mock-empty": "proposers.mock_specs:EMPTY",
    "mock-drawn": "proposers.mock_drawn:SPEC",
    "mock-draft-model": "proposers.mock_model_specs:DRAFT_MODEL",
    "mock-eagle": "proposers.mock_model_specs:EAGLE",
    "mock-mtp": "proposers.mock_model_specs:MTP",
}


def find(name: str) -> ProposerSpec:
    """The registration of a built proposer.

    Raises ValueError, listing the valid names, for a name that is unknown or unsupported; and where
    a name is registered twice, or a package was written for another interface.
    """
    points = _entry_points()
    if name in points:
        return _load(points[name])
    valid = ", ".join(name for name in points if name not in _SCRIPTED)
    for info in REFUSED:
        if info.name == name:
            raise ValueError(
                f"proposer {name!r} is {info.status}: {info.reason}; in its place: "
                f"{' or '.join(info.instead)}; use one of: {valid}"
            )
    raise ValueError(f"unknown proposer {name!r}; use one of: {valid}")


def create(name: str, options: Mapping[str, object], runtime: Runtime) -> Proposer:
    """Build the proposer registered as name with its own options.

    Raises ValueError for a name that find() refuses, an option or value that is not allowed, what
    only the runtime can tell, e.g. an id outside the vocabulary, and what `checked` refuses.
    """
    spec = find(name)
    assert spec.factory is not None, f"proposer {name!r} carries a model: see `plan`"
    return checked(spec.factory(spec.info.resolve(options), runtime), spec)


def plan(name: str, options: Mapping[str, object], site: DraftSite) -> DraftPlan | None:
    """What the proposer registered as name needs of the engine; None where it carries no model.

    Raises ValueError for a name that find() refuses, an option or value that is not allowed, and a
    checkpoint that does not fit.
    """
    spec = find(name)
    return None if spec.open is None else spec.open(spec.info.resolve(options), site)


def checked(proposer: Proposer, spec: ProposerSpec) -> Proposer:
    """The proposer; ValueError where it is not what its registration says, or lacks a method."""
    info = spec.info
    contract = Proposer if spec.open is None else ModelProposer
    names = [name for name in dir(contract) if not name.startswith("_")]
    missing = [name for name in names if not hasattr(proposer, name)]
    if missing:
        raise ValueError(
            f"proposer {info.name!r} lacks {', '.join(missing)} of {contract.__module__}."
            f"{contract.__name__}"
        )
    for flag in ("name", "graph_safe", "needs_hidden_states", "produces_probs"):
        said, found = getattr(info, flag), getattr(proposer, flag)
        if said != found:
            raise ValueError(
                f"proposer {info.name!r}: {flag} is {found!r} in its class and {said!r} in its "
                "ProposerInfo; the two must agree"
            )
    return proposer


def overridden(proposer: Proposer, matcher: str, *, min_match: int, runtime: Runtime) -> Proposer:
    """A model's proposer whose drafts give way to long matches of another, with its defaults."""
    assert isinstance(proposer, ModelProposer), f"{proposer.name} carries no model"
    other = create(matcher, {}, runtime)
    return OverridingProposer(proposer, other, min_match=min_match)


def infos(*, testing: bool = False) -> list[ProposerInfo]:
    """Rows of the support matrix: built, third-party, refused; scripted ones only if testing.

    Raises ValueError where an entry point cannot be loaded or its name is taken.
    """
    points = _entry_points()
    listed = [point for name, point in points.items() if testing or name not in _SCRIPTED]
    return [*(replace(_load(point).info, interface=INTERFACE) for point in listed), *REFUSED]


def _entry_points() -> dict[str, EntryPoint]:
    """Those of this package and those installed, by name; none is imported yet."""
    own = [
        EntryPoint(name, value, ENTRY_POINT_GROUP)
        for name, value in {**_BUILTIN, **_SCRIPTED}.items()
    ]
    installed = _installed(tuple(sys.path))
    taken = Counter(point.name for point in (*own, *installed))
    taken.update(info.name for info in REFUSED)
    for point in installed:
        if taken[point.name] > 1:
            raise ValueError(
                f"proposer name {point.name!r} of entry point {point.value!r} is registered twice; "
                f"rename it or uninstall one of the packages that define it"
            )
    return {point.name: point for point in (*own, *installed)}


@lru_cache(maxsize=1)
def _installed(path: tuple[str, ...]) -> list[EntryPoint]:
    """Those of packages on a search path, which is read once: it takes milliseconds."""
    return sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name)


def _load(point: EntryPoint) -> ProposerSpec:
    origin = f"entry point {point.name!r} = {point.value!r} of group {ENTRY_POINT_GROUP!r}"
    try:
        spec = point.load()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{origin} cannot be loaded: {error}") from error
    if not isinstance(spec, ProposerSpec):
        raise ValueError(f"{origin} is a {type(spec).__name__}; it must be a ProposerSpec")
    if spec.info.name != point.name:
        raise ValueError(f"{origin} is named {spec.info.name!r} in its info; the two must agree")
    own = point.name in _BUILTIN or point.name in _SCRIPTED
    if not own and spec.info.interface != INTERFACE:
        raise ValueError(
            f"{origin} is written for interface {spec.info.interface or None!r} of proposers, and "
            f"this is {INTERFACE!r}: install a version that fits; one that does says "
            f"interface={INTERFACE!r} in its ProposerInfo"
        )
    return spec
