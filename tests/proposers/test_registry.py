"""Names of proposers: hard errors, third-party entry points, the support matrix."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from proposers import INTERFACE, Proposer, ProposerInfo, ProposerSpec, registry
from proposers.mock_model_specs import EAGLE
from proposers.ngram import NgramProposer
from proposers.refused import REFUSED
from tests.proposers.helpers import TinyRuntime, install_entry_point, make_inputs
from tests.third_party import repeat_last

THIRD_PARTY = "tests.third_party.repeat_last"


def create(name: str, **options: object) -> object:
    return registry.create(name, options, TinyRuntime())


def test_unknown_name_lists_the_valid_ones() -> None:
    """Guards against a misspelt proposer that silently means no speculation."""
    with pytest.raises(ValueError, match=r"unknown proposer 'n-gram'; use one of: ngram, suffix, "):
        create("n-gram")


@pytest.mark.parametrize("info", REFUSED, ids=lambda info: info.name)
def test_known_but_refused_names_say_why(info: ProposerInfo) -> None:
    """Guards against a known method that looks like a typing error, or half works."""
    built = {one.name for one in registry.infos() if one.status == "built"}
    assert set(info.instead) <= built
    said = rf"'{info.name}' is unsupported: .{{10,}}; in its place: .*{info.instead[0]}.*; use one "
    with pytest.raises(ValueError, match=said + "of: ngram"):
        create(info.name)


def test_default_list_hides_the_scripted_proposers() -> None:
    """Guards against test tools in the list that users choose from."""
    listed = [info.name for info in registry.infos()]
    assert listed[:2] == ["ngram", "suffix"]
    assert not [name for name in listed if name.startswith("mock-")]
    everything = registry.infos(testing=True)
    assert {info.name for info in everything} >= {*listed, "mock-oracle", "mock-empty"}
    assert len({info.name for info in everything}) == len(everything)


def test_a_name_imports_its_own_file_alone() -> None:
    """Guards a start that loads every proposer, and tools of the tests, to find one."""
    code = (
        "import sys; from proposers import registry; registry.find('ngram');"
        "print(*(name for name in sys.modules if name.startswith('proposers.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = set(done.stdout.split())
    assert "proposers.ngram" in found
    assert not found & {"proposers.suffix", "proposers.eagle", "proposers.mock"}


def test_every_row_of_the_matrix_explains_itself() -> None:
    """Guards against empty cells in the printed matrix."""
    for info in registry.infos(testing=True):
        assert info.summary
        refused = info.status == "unsupported"
        assert bool(info.reason) == bool(info.instead) == refused, info.name
        assert info.interface == ("" if refused else INTERFACE), info.name
        for option in info.options:
            assert option.doc, f"{info.name}.{option.name}"


def test_third_party_is_listed_and_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against an entry-point group that is documented but never read."""
    install_entry_point(monkeypatch, tmp_path, "repeat-last", f"{THIRD_PARTY}:SPEC")
    assert "repeat-last" in [info.name for info in registry.infos()]
    proposer = registry.create("repeat-last", {"times": 2}, TinyRuntime())
    draft = proposer.propose(make_inputs({"a": [7, 9]}, k=3))
    assert draft.token_ids.tolist() == [[9, 9, -1]]
    with pytest.raises(ValueError, match=r"use one of: ngram, suffix, .*repeat-last"):
        create("nothing")


@pytest.mark.parametrize("name", ["ngram", "mock-oracle", "medusa"])
def test_taken_name_is_an_error_even_if_another_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """Guards against a plug-in that quietly replaces, or is replaced by, a built-in one."""
    install_entry_point(monkeypatch, tmp_path, name, f"{THIRD_PARTY}:SPEC")
    with pytest.raises(ValueError, match=rf"'{name}'.*registered twice"):
        create("ngram")
    with pytest.raises(ValueError, match=rf"'{name}'.*registered twice"):
        registry.infos()


@pytest.mark.parametrize(
    ("name", "target", "message"),
    [
        ("gone", "tests.proposers.no_such_module:SPEC", "cannot be loaded"),
        ("gone", f"{THIRD_PARTY}:NO_SUCH_NAME", "cannot be loaded"),
        ("wrong", f"{THIRD_PARTY}:RepeatLast", "must be a ProposerSpec"),
        ("other-name", f"{THIRD_PARTY}:SPEC", "is named 'repeat-last' in its info"),
    ],
)
def test_broken_entry_point_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, target: str, message: str
) -> None:
    """Guards against a traceback from inside somebody's package, or a plug-in silently dropped."""
    install_entry_point(monkeypatch, tmp_path, name, target)
    with pytest.raises(ValueError, match=message) as error:
        create(name)
    assert target in str(error.value)
    # A broken plug-in is no reason to refuse a proposer that does not need it.
    assert isinstance(create("ngram"), NgramProposer)


@pytest.mark.parametrize("written_for", ["", "0", "2"])
def test_another_interface_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, written_for: str
) -> None:
    """Guards against a package that is called in a way that it was not written for."""
    other = replace(repeat_last.INFO, interface=written_for)
    spec = ProposerSpec(info=other, factory=repeat_last.build)
    monkeypatch.setattr(repeat_last, "SPEC", spec)
    install_entry_point(monkeypatch, tmp_path, "repeat-last", f"{THIRD_PARTY}:SPEC")
    message = f"'repeat-last' = .* for interface {written_for or None!r} of .* this is '1'"
    for call in (lambda: create("repeat-last"), registry.infos):
        with pytest.raises(ValueError, match=message):
            call()
    assert isinstance(create("ngram"), NgramProposer)


class Unfinished:
    """A proposer that was written before the contract was complete."""

    name = "ngram"
    graph_safe = needs_hidden_states = produces_probs = False

    def propose(self, inputs: object) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("spec", "lacks"),
    [
        (registry.find("ngram"), "capture, forget, on_commit of proposers.base.Proposer"),
        (EAGLE, "first_drafts, forget, on_commit, prefill, suspects, variants of .*ModelProposer"),
    ],
)
def test_missing_methods_are_named(spec: ProposerSpec, lacks: str) -> None:
    """Guards against a model's proposer that passes for one of the host and gets no KV."""
    with pytest.raises(ValueError, match=f"proposer '{spec.info.name}' lacks .*{lacks}"):
        registry.checked(cast(Proposer, Unfinished()), spec)


def test_options_are_checked_without_a_runtime() -> None:
    """Guards against values that are refused only after minutes of loading a model."""
    for name, given, message in (
        ("ngram", {"min_ngram_size": 6}, r"min_ngram_size=6: .* from 1 to 5"),
        ("ngram", {"max_ngram_size": True}, "max_ngram_size=True"),
        ("mock-junk", {"token_id": -1}, "token_id=-1: .* None or an integer"),
        ("mock-accept-exactly", {"num_accepted": -1}, "num_accepted=-1"),
        ("mock-ragged", {"seed": 0.5}, r"seed=0\.5"),
    ):
        with pytest.raises(ValueError, match=f"proposer '{name}': {message}"):
            registry.find(name).info.resolve(given)


def test_every_default_is_allowed() -> None:
    """Guards against a default that its own rule, or the rule over all options, refuses."""
    for info in registry.infos(testing=True):
        assert info.resolve({}) == {option.name: option.default for option in info.options}


def test_a_factory_gets_every_option(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against third parties that have to fill in, or to check, their own options."""
    install_entry_point(monkeypatch, tmp_path, "repeat-last", f"{THIRD_PARTY}:SPEC")
    proposer = registry.create("repeat-last", {}, TinyRuntime())
    assert proposer.propose(make_inputs({"a": [9]}, k=4)).token_ids.tolist() == [[9, 9, 9, -1]]
    with pytest.raises(ValueError, match="times=0: expected an integer from 1 to 64"):
        registry.create("repeat-last", {"times": 0}, TinyRuntime())


def test_flags_that_disagree_with_the_info_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards against a support matrix, and refusals, that contradict the class."""
    monkeypatch.setattr(NgramProposer, "produces_probs", True)
    with pytest.raises(ValueError, match="proposer 'ngram': produces_probs is True in its class"):
        registry.create("ngram", {}, TinyRuntime())
