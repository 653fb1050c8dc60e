"""SpeculativeConfig as a value, and who decides whether an engine speculates."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch

from capture.config import CaptureConfig
from graphengine.config import EngineConfig
from graphengine.engine import Engine
from graphengine.llm import LLM
from graphengine.models.loader import open_model
from graphengine.resolve import resolve
from graphengine.speculative_config import SPECULATE_VARIABLE, SpeculativeConfig
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.setups import Setup

CONFIG = SpeculativeConfig("ngram", max_draft_tokens=3, min_ngram_size=3)


def test_it_is_a_value() -> None:
    """Two equal configurations that differ, or one that cannot be a key or cross a process."""
    same = SpeculativeConfig("ngram", max_draft_tokens=3, min_ngram_size=3, max_ngram_size=5)
    assert same == CONFIG
    assert hash(same) == hash(CONFIG)
    assert SpeculativeConfig("ngram", max_draft_tokens=3) != CONFIG
    assert copy.deepcopy(CONFIG) == pickle.loads(pickle.dumps(CONFIG)) == CONFIG
    assert "min_ngram_size" in repr(CONFIG)


@pytest.mark.parametrize("name", ["max_draft_tokens", "options", "method"])
def test_it_cannot_be_changed(name: str) -> None:
    """A field set after the checks have run."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(CONFIG, name, 0)
    assert not hasattr(CONFIG, "__dict__")


def test_replace_keeps_what_is_not_named() -> None:
    """Options lost when one field is changed."""
    wider = dataclasses.replace(CONFIG, max_draft_tokens=4)
    assert wider == SpeculativeConfig("ngram", max_draft_tokens=4, min_ngram_size=3)
    change: dict[str, Any] = {"max_ngram_size": 4}
    smaller = dataclasses.replace(CONFIG, **change)
    assert dict(smaller.options) == {
        "max_ngram_size": 4,
        "min_ngram_size": 3,
        "limit_by_match": True,
    }
    with pytest.raises(ValueError, match="max_draft_tokens=0"):
        dataclasses.replace(CONFIG, max_draft_tokens=0)


@pytest.mark.parametrize(
    ("given", "variable", "expected"),
    [
        (None, None, 0),
        (None, "ngram:2", 2),
        (None, "off", 0),
        ("off", "ngram:2", 0),
        ("ngram:3", "ngram:2", 3),
        (CONFIG, "off", 3),
    ],
)
def test_an_engine_and_an_llm_decide_alike(
    given: SpeculativeConfig | str | None,
    variable: str | None,
    expected: int,
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The environment read by one of the two, or winning over an argument."""
    if variable is not None:
        monkeypatch.setenv(SPECULATE_VARIABLE, variable)
    config = dataclasses.replace(Setup().config(), speculative=given)
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    engine = Engine(checkpoints.get(), config)
    with LLM(checkpoints.get(), **fields) as llm:
        for one in (engine, llm.engine):
            assert one.resolved.sizes.max_draft_tokens == expected
            assert (one.proposer is not None) == (expected > 0)
    engine.close()


def test_off_stays_off_in_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """An explicit off that a changed copy forgets, to ask the environment again."""
    monkeypatch.setenv(SPECULATE_VARIABLE, "ngram")
    copied = dataclasses.replace(EngineConfig(speculative="off"), max_num_seqs=2)
    assert copied.speculative == "off"
    assert SpeculativeConfig.resolve(copied.speculative) is None


def test_the_environment_is_checked_too(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A misspelt variable that silently means off."""
    monkeypatch.setenv(SPECULATE_VARIABLE, "ngram:many")
    with pytest.raises(ValueError, match=f"{SPECULATE_VARIABLE}='ngram:many'"):
        Engine(checkpoints.get(), Setup().config())


def test_the_device_is_resolved_once(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of an engine that choose a device of their own."""
    setup = Setup(k=2)
    engine = setup.start(checkpoints.get())
    tensors = [
        engine.runner.decoder.weights.embed,
        engine.runner.decoder.kv_caches[0],
        engine.runner.buffers.whole("logits"),
    ]
    assert {tensor.device for tensor in tensors} == {engine.resolved.device}
    assert engine.resolved.device == torch.device("cpu")
    monkeypatch.setattr("graphengine.resolve.resolve_device", lambda _: torch.device("meta"))
    config = dataclasses.replace(setup.config(), capture=CaptureConfig(graph="cuda"))
    with pytest.raises(ValueError, match="device meta"):
        resolve(open_model(checkpoints.get()).config, config)
