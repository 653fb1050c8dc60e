"""Faults of a draft's configuration: each is refused before weights are read, by name (case 41)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from graphengine import startup
from graphengine.config import EngineConfig
from graphengine.engine import Engine
from graphengine.memory import plan_memory
from graphengine.sampling.params import SamplingParams
from graphengine.speculative_config import SpeculativeConfig
from tests.graphengine.engine.checkpoints import Checkpoints, edit_weights
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Setup
from tests.tiny import VOCAB_SIZE, make_checkpoint

PROMPT = [5, 6, 7]
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "draft_model"}, "model=None: proposer 'draft_model' needs the path"),
        ({"method": "draft_model", "model": ""}, "model='': expected the path"),
        ({"method": "draft_model", "model": 7}, "model=7: expected the path"),
        ({"method": "ngram", "model": "x"}, "model='x': proposer 'ngram' carries no model"),
        ({"method": "ngram", "self_check": "off"}, "self_check='off': proposer 'ngram' carries no"),
        ({"method": "ngram", "override": "suffix"}, "override='suffix': proposer 'ngram' carries"),
        ({"method": "draft_model", "model": "x", "override": "eagle"}, "override='eagle': allowed"),
        (
            {"method": "draft_model", "model": "x", "override_min_match": 3},
            "override_min_match=3: there is no override",
        ),
        (
            {"method": "draft_model", "model": "x", "override": "ngram", "override_min_match": 6},
            "override_min_match=6: expected an integer from 1 to 5",
        ),
        ({"method": "draft_model", "model": "x", "max_draft_tokens": 0}, "max_draft_tokens=0"),
        ({"method": "draft_model", "model": "x", "max_draft_tokens": 1.9}, "max_draft_tokens=1.9"),
        ({"method": "draft_model", "model": "x", "layers": 2}, "has no option 'layers'"),
        ({"method": "draft_model", "model": "x", "self_check": "maybe"}, "self_check='maybe'"),
    ],
)
def test_a_bad_field_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig(**fields)


def start(target: Path, draft: Path | str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start an engine that must be refused; reading a weight fails the test."""

    def no_weights(*given: Any, **named: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(startup, "load_weights", no_weights)
    speculative = SpeculativeConfig("draft_model", model=draft, max_draft_tokens=3, adaptive=False)
    Engine(target, EngineConfig(max_model_len=64, max_num_seqs=2, speculative=speculative))


def test_a_missing_checkpoint(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = r"SpeculativeConfig.model=.*nowhere.* does not exist"
    with pytest.raises(ValueError, match=where) as raised:
        start(checkpoints.get(), tmp_path / "nowhere", monkeypatch)
    assert str(raised.value).count("SpeculativeConfig.model") == 1


def test_a_draft_model_that_lacks_a_tensor(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards an error that comes after the target's weights and names neither path nor field."""
    draft = tmp_path / "broken"
    shutil.copytree(checkpoints.get(), draft)
    edit_weights(draft, lambda weights: weights.pop("model.layers.0.mlp.down_proj.weight"))
    with pytest.raises(ValueError, match=r"SpeculativeConfig.model=.*broken.*lacks 1 parameters"):
        start(checkpoints.get(), draft, monkeypatch)


def test_another_tokenizer(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards case 39: same size, permuted strings."""
    draft = tmp_path / "permuted"
    shutil.copytree(checkpoints.get(), draft)
    file = draft / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.get)[65:67]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match=r"token id 65 is .* must have the target's tokenizer"):
        start(checkpoints.get(), draft, monkeypatch)


def test_sizes_that_nothing_explains(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = make_checkpoint(
        tmp_path / "bare", tokenizer=False, vocab_size=100, bos_token_id=0, eos_token_id=1
    )
    with pytest.raises(ValueError, match="nothing shows that they mean the same"):
        start(checkpoints.get(), bare, monkeypatch)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_dim": 512}, "head_dim=512: the attention kernels serve up to"),
        ({"mlp_bias": True}, "mlp_bias=True: MLP biases are not supported"),
    ],
)
def test_layers_that_cannot_be_made(
    fields: dict[str, Any],
    message: str,
    checkpoints: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards a draft's layers that are held to less than the target's."""
    draft = make_checkpoint(tmp_path / "draft", **fields)
    with pytest.raises(ValueError, match=rf"SpeculativeConfig.model=.*draft.*: {message}"):
        start(checkpoints.get(), draft, monkeypatch)


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE - 2, VOCAB_SIZE + 60])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_rows_are_reconciled(
    vocab_size: int, temperature: float, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Guards case 39: ids beyond either vocabulary are never drafted nor embedded."""
    draft = make_checkpoint(tmp_path / "padded", vocab_size=vocab_size)
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=temperature, seed=3)
    streams = []
    for setup in (Setup(), Setup(k=3)):
        options = {"method": "draft_model", "model": str(draft), "self_check": "off"}
        options = options if setup.k else {}
        harness = Harness(setup.start(checkpoints.get(), **options))
        harness.add("last", [VOCAB_SIZE - 1] * 3, params)  # an id that the small draft lacks
        harness.add("other", PROMPT, params)
        harness.drain()
        streams.append([harness.stream("last"), harness.stream("other")])
        harness.engine.close()
    assert streams[0] == streams[1]


def test_a_short_draft_stops_drafting(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Guards case 27: no position of the draft goes past its own limit."""
    draft = make_checkpoint(tmp_path / "short", max_position_embeddings=32)
    options = {"method": "draft_model", "model": str(draft), "self_check": "off"}
    harness = Harness(Setup(k=3).start(checkpoints.get(), **options))
    off = Harness(Setup().start(checkpoints.get()))
    for one in (harness, off):
        one.add("long", PROMPT, SamplingParams(max_tokens=60, ignore_eos=True))
        one.drain()
    assert harness.stream("long") == off.stream("long")
    stats = harness.engine.stats()
    drafted = sum(n for key, n in stats.replays.items() if key.endswith(":draft"))
    assert 0 < drafted < stats.num_steps
    for one in (harness, off):
        one.engine.close()


def test_the_plan_counts_the_draft(checkpoints: Checkpoints) -> None:
    """Guards case 56: weights, KV and buffers of the draft are in the memory plan."""
    target = checkpoints.get()
    plain = Setup(num_blocks=20).start(target)
    engine = Setup(k=3, num_blocks=20).start(target, method="draft_model", model=str(target))
    alone, both = plan_memory(plain.resolved), plan_memory(engine.resolved)
    assert both.weights == 2 * alone.weights
    assert both.kv == 2 * alone.kv
    assert both.buffers == engine.runner.buffers.num_bytes > alone.buffers
    with pytest.raises(ValueError, match=f"weights {both.weights}"):
        both.check(both.total - 1)
    for one in (plain, engine):
        one.close()
