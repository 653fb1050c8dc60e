"""The contract that proposers are written to, held down word for word.

`interface_1.txt` lists every class of base, device and info with its members as version 1 has them.
What is listed may not go, or be asked for in another way; and where proposers define or make
something, nothing may be added that they would have to bring. Both ask for the next version, and
`record()` for its file; before a version is first released its file may be recorded anew.
"""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import pytest

from proposers import INTERFACE, base, device, info
from proposers.base import Draft, Proposer
from proposers.device import DraftPlan, ModelProposer

FILE = Path(__file__).with_name(f"interface_{INTERFACE}.txt")
MODULES = (base, device, info)
BY_PROPOSERS = (Proposer, ModelProposer)  # defined by them: more methods break them


def members(kind: type) -> dict[str, str]:
    """What a class asks for or offers, by name: signatures, types of fields."""
    if dataclasses.is_dataclass(kind):
        found = {
            field.name: f"{field.type}{'' if _is_required(field) else ' = ...'}"
            for field in dataclasses.fields(kind)
        }
    else:
        found = {}
    for name in dir(kind):
        value = inspect.getattr_static(kind, name)
        value = value.__func__ if isinstance(value, classmethod) else value
        if name.startswith("_") or name in found:
            continue
        if isinstance(value, property):
            found[name] = f"-> {inspect.signature(value.fget).return_annotation}"  # type: ignore[arg-type]
        elif inspect.isfunction(value):
            found[name] = str(inspect.signature(value))
    return found


def _is_required(field: dataclasses.Field[object]) -> bool:
    return field.default is field.default_factory is dataclasses.MISSING


def interface() -> dict[str, dict[str, str]]:
    """Members of every public class of the three files."""
    kinds = [
        value
        for module in MODULES
        for name, value in sorted(vars(module).items())
        if inspect.isclass(value) and value.__module__ == module.__name__ and name[0] != "_"
    ]
    return {kind.__name__: members(kind) for kind in kinds}


def listed(found: dict[str, dict[str, str]]) -> list[str]:
    return [
        f"{kind}.{name} {text}" for kind, parts in found.items() for name, text in parts.items()
    ]


def record() -> None:
    FILE.write_text("\n".join(listed(interface())) + "\n", encoding="utf-8")


def broken(recorded: list[str], now: list[str]) -> list[str]:
    """Lines of the record that no longer hold, and lines that break who was written to it."""
    gone = [f"gone: {line}" for line in recorded if line not in now]
    kinds = {kind.__name__ for kind in BY_PROPOSERS}
    made = {kind.__name__ for kind in (Draft, DraftPlan, info.ProposerInfo, info.ProposerSpec)}
    for line in now:
        name, _, text = line.partition(" ")
        kind = name.split(".")[0]
        wanted = kind in kinds or (kind in made and not text.startswith("(") and "=" not in text)
        if wanted and line not in recorded:
            gone.append(f"asked for: {line}")
    return gone


def test_the_interface_is_the_recorded_one() -> None:
    """Guards packages of others, which would find out when they are called."""
    recorded = FILE.read_text(encoding="utf-8").splitlines()
    found = broken(recorded, listed(interface()))
    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Proposer.forget (", None, "gone: Proposer.forget"),
        ("ProposeInputs.k int", "ProposeInputs.k float", "gone: ProposeInputs.k int"),
        (None, "ModelProposer.warm_up (self) -> 'None'", "asked for: ModelProposer.warm_up"),
        (None, "Draft.scores TokenArray", "asked for: Draft.scores"),
    ],
)
def test_planted_changes_are_found(old: str | None, new: str | None, message: str) -> None:
    """Guards the check above."""
    recorded = FILE.read_text(encoding="utf-8").splitlines()
    now = [line for line in recorded if old is None or not line.startswith(old)]
    assert old is None or len(now) < len(recorded)
    now += [new] if new is not None else []
    assert any(line.startswith(message) for line in broken(recorded, now))


def test_additions_that_nobody_has_to_bring_are_none() -> None:
    """Guards against a version for everything: the engine may offer more."""
    recorded = FILE.read_text(encoding="utf-8").splitlines()
    more = [
        "DraftOps.add (self) -> 'None'",
        "ProposeInputs.mood str | None = ...",
        "Draft.x int = ...",
    ]
    assert not broken(recorded, recorded + more)
