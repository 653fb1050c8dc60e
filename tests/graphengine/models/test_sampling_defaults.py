"""Sampling defaults of checkpoints: which keys count, when, and who wins."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from graphengine.llm import LLM
from graphengine.models.loader import open_model
from graphengine.models.sampling_defaults import SamplingDefaults
from graphengine.sampling.params import SamplingParams
from tests.tiny import EOS_ID, make_checkpoint, make_gguf

Write = Callable[..., SamplingDefaults]
ALL: dict[str, Any] = {
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "max_new_tokens": 40,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def write(checkpoint: Path) -> Write:
    """The defaults of a checkpoint whose generation_config.json holds these keys."""

    def call(**keys: Any) -> SamplingDefaults:
        (checkpoint / "generation_config.json").write_text(json.dumps(keys))
        return open_model(checkpoint).sampling_defaults

    return call


@pytest.mark.parametrize("key", [key for key in ALL if key != "do_sample"])
def test_each_key_becomes_its_field(write: Write, key: str) -> None:
    """Guards a key that is read into the wrong field, or not at all."""
    field = "max_tokens" if key == "max_new_tokens" else key
    expected = {"temperature": 1.0, field: ALL[key]}  # transformers' temperature, if none is named
    assert write(do_sample=True, **{key: ALL[key]}).params() == SamplingParams(**expected)
    nothing = write(do_sample=True, **{key: None})
    assert nothing.params() == SamplingParams(temperature=1.0), "null is absent"


def test_all_keys_together_and_foreign_ones(write: Write) -> None:
    """Guards keys of other purposes taken for mistakes, and end-of-text ids that get lost."""
    other = {"num_beams": 4, "pad_token_id": 0, "transformers_version": "5", "eos_token_id": [7, 9]}
    expected = {key: value for key, value in ALL.items() if key != "do_sample"}
    expected["max_tokens"] = expected.pop("max_new_tokens")
    defaults = write(**ALL, **other)
    assert defaults.params() == SamplingParams(**expected)
    assert open_model(Path(defaults.source).parent).config.eos_token_ids == (EOS_ID, 7, 9)


@pytest.mark.parametrize("switch", [{"do_sample": False}, {"do_sample": None}, {}])
def test_without_do_sample_it_is_greedy(write: Write, switch: dict[str, Any]) -> None:
    """Guards sampling from a checkpoint that transformers decodes greedily.

    A temperature asked for does not bring the file's top-k back, and a value that is not looked at
    is not refused.
    """
    rest = {key: value for key, value in ALL.items() if key != "do_sample"}
    greedy = SamplingParams(max_tokens=40, repetition_penalty=1.1)
    assert write(**rest, **switch).params() == greedy
    defaults = write(**{**rest, "top_p": 7, **switch})
    assert defaults.params(temperature=0.5) == SamplingParams(
        temperature=0.5, max_tokens=40, repetition_penalty=1.1
    )


@pytest.mark.parametrize("keys", [ALL, {"do_sample": True, "top_p": 0.5}, {"temperature": 0.5}])
def test_transformers_reads_the_same(write: Write, keys: dict[str, Any]) -> None:
    """Guards a meaning of the file that is not transformers' own, its top-k of 50 left aside."""
    params = write(**keys).params()
    theirs = transformers.GenerationConfig(**keys)
    assert (params.temperature > 0) == bool(theirs.do_sample)
    if theirs.do_sample:
        assert params.temperature == (1.0 if theirs.temperature is None else theirs.temperature)
        assert params.top_p == theirs.top_p
        assert params.top_k == keys.get("top_k", 0)


def test_changes_win(write: Write) -> None:
    """Guards defaults over what the caller asks for, and a refusal of a value nobody uses."""
    params = write(**{**ALL, "top_k": "many"}).params(
        temperature=0.0, top_k=3, max_tokens=None, seed=5, stop="end"
    )
    assert (params.temperature, params.top_k, params.max_tokens) == (0.0, 3, None)
    assert (params.top_p, params.seed, params.stop) == (0.95, 5, ("end",))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("do_sample", "yes"),
        ("do_sample", 1),
        ("temperature", -1),
        ("top_k", 2.5),
        ("top_p", 0),
        ("min_p", "x"),
        ("repetition_penalty", True),
        ("max_new_tokens", 0),
        ("temperature", [0.5]),
    ],
)
def test_bad_values_are_refused_when_asked_for(write: Write, key: str, value: Any) -> None:
    """Guards a checkpoint that cannot be loaded for what nobody uses, and a refusal without a name.

    `write` opens the checkpoint, as an engine does.
    """
    defaults = write(**{"do_sample": True, key: value})
    with pytest.raises(ValueError, match="expected") as refusal:
        defaults.params()
    assert str(refusal.value).startswith(f"{defaults.source}: {key}={value!r}")
    assert defaults.source.endswith("generation_config.json")


def _write_gguf(checkpoint: Path, path: Path, sampling: dict[str, Any]) -> SamplingDefaults:
    general = {f"general.sampling.{key}": value for key, value in sampling.items()}
    return open_model(make_gguf(checkpoint, path, general=general)).sampling_defaults


def test_gguf_keys(checkpoint: Path, tmp_path: Path) -> None:
    """Guards a GGUF file's own spelling: what it names is used, without a switch."""
    sampling = {"temp": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.125, "penalty_repeat": 1.5}
    assert _write_gguf(checkpoint, tmp_path / "all.gguf", sampling).params() == SamplingParams(
        temperature=0.5, top_k=20, top_p=0.75, min_p=0.125, repetition_penalty=1.5
    )
    alone = _write_gguf(checkpoint, tmp_path / "one.gguf", {"top_k": 20})
    assert alone.params() == SamplingParams(temperature=1.0, top_k=20)
    penalty = _write_gguf(checkpoint, tmp_path / "two.gguf", {"penalty_repeat": 1.5})
    assert penalty.params(max_tokens=3) == SamplingParams(repetition_penalty=1.5, max_tokens=3)
    bad = _write_gguf(checkpoint, tmp_path / "bad.gguf", {"temp": -1.0})
    with pytest.raises(ValueError, match=r"bad\.gguf: general\.sampling\.temp=-1\.0"):
        bad.params()


def test_checkpoints_without_any(checkpoint: Path, tmp_path: Path) -> None:
    """Guards made-up defaults where a checkpoint recommends nothing."""
    plain = SamplingParams(temperature=0.7)
    assert _write_gguf(checkpoint, tmp_path / "m.gguf", {}).params(temperature=0.7) == plain
    (checkpoint / "generation_config.json").unlink(missing_ok=True)
    assert open_model(checkpoint).sampling_defaults.params(temperature=0.7) == plain


def test_an_engine_uses_them_only_when_asked(checkpoint: Path) -> None:
    """Guards defaults that reach a request by themselves."""
    keys = {"repetition_penalty": 1000.0, "max_new_tokens": 8, "do_sample": True, "top_k": 1}
    path = checkpoint / "generation_config.json"
    path.write_text(json.dumps(keys))
    with LLM(checkpoint, max_num_seqs=1, max_model_len=64) as llm:
        params = llm.default_params(ignore_eos=True)
        assert params == SamplingParams(
            repetition_penalty=1000.0, max_tokens=8, temperature=1.0, top_k=1, ignore_eos=True
        )
        prompt = [[5, 9, 200]]
        asked = llm.generate(prompt, params)[0].outputs[0].token_ids
        unasked = llm.generate(prompt)[0].outputs[0].token_ids
        plain = llm.generate(prompt, SamplingParams())[0].outputs[0].token_ids
    assert len(asked) == 8
    assert unasked == plain != asked
    path.unlink()
