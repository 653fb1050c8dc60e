"""The tiny checkpoints themselves: tests that run on them prove nothing if they are degenerate."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from graphengine.models.loader import open_model
from tests.tiny import BOS_ID, TinyCase, make_checkpoint, make_model, make_tokenizer, tiny_matrix


@pytest.mark.parametrize("case", tiny_matrix(), ids=lambda case: case.name)
def test_greedy_text_varies(case: TinyCase) -> None:
    """Guards parity tests against models that say one token for ever, on any input."""
    model = make_model(case.arch, **case.overrides)
    tokens = torch.tensor([[BOS_ID, 10, 20, 30]])
    with torch.no_grad():
        for _ in range(64):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
    assert len(set(tokens[0, 4:].tolist())) >= 10


def test_names_are_unique_and_the_matrix_is_complete() -> None:
    """Guards the coverage that the parity tests claim."""
    cases = tiny_matrix()
    assert len({case.name for case in cases}) == len(cases)
    configs = []
    for case in cases:
        raw = make_model(case.arch, **case.overrides).config
        configs.append((case.arch, raw))
    ratios = {c.num_attention_heads // c.num_key_value_heads for _, c in configs}
    assert ratios >= {1, 3, 4, 8}
    assert {c.rope_parameters["rope_type"] for _, c in configs} == {
        "default",
        "linear",
        "llama3",
        "yarn",
    }
    assert {(arch, c.tie_word_embeddings) for arch, c in configs} == {
        (arch, tied) for arch in ("llama", "mistral", "qwen2", "qwen3") for tied in (False, True)
    }


def test_same_seed_same_weights_other_seed_others(tmp_path: Path) -> None:
    """Guards tests that compare two makings of one checkpoint."""
    name = "model.layers.0.mlp.up_proj.weight"
    weights = [
        open_model(make_checkpoint(tmp_path / str(i), seed=seed)).source.read(name)
        for i, seed in enumerate((0, 0, 1))
    ]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("case", tiny_matrix(), ids=lambda case: case.name)
def test_one_is_small(case: TinyCase) -> None:
    """Guards the suite's run time: hundreds of tests make one and run it."""
    model = make_model(case.arch, **case.overrides)
    assert sum(parameter.numel() for parameter in model.parameters()) <= 200_000


def test_tokenizer_ids_stay_below_the_models_vocabulary() -> None:
    """Guards the intended gap: the model has rows that the tokenizer does not know."""
    backend: Tokenizer = make_tokenizer().backend_tokenizer
    assert backend.get_vocab_size() == 262 < make_model("llama").config.vocab_size
