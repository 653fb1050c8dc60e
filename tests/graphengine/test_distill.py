"""The engine as a teacher, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from graphengine.distill import EngineTeacher, describe_target, fingerprint
from graphengine.models.decoder import DecoderWeights
from graphengine.models.loader import load_weights, open_model
from tests.tiny import make_checkpoint, make_model

pytestmark = pytest.mark.parity

LENGTHS = (1, 5, 300, 40)  # one longer than a forward, shorter ones behind it


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_rows_are_those_of_transformers(tmp_path: Path, arch: str) -> None:
    """Guards a tap of the layer before or behind, a final state without its norm, rows of the text
    before, and a cache that is read past its end.
    """
    checkpoint = open_model(make_checkpoint(tmp_path, arch))
    model = make_model(arch)
    teacher = EngineTeacher(checkpoint, taps=(2, 0, 1), max_length=max(LENGTHS))
    generator = torch.Generator().manual_seed(1)
    for length in LENGTHS:
        token_ids = torch.randint(256, (length,), generator=generator).tolist()
        with torch.no_grad():
            theirs = model(torch.tensor([token_ids]), output_hidden_states=True)
            embedded, first, final = (states[0] for states in theirs.hidden_states)
        rows = teacher.run(token_ids)
        last, before, middle = rows.aux.split(64, dim=-1)
        close = {"rtol": 1e-3, "atol": 1e-3}
        torch.testing.assert_close(before, embedded, **close)
        torch.testing.assert_close(middle, first, **close)
        torch.testing.assert_close(rows.final, final, **close)  # the last of these is normed
        normed = last * torch.rsqrt(last.square().mean(-1, keepdim=True) + 1e-5)
        torch.testing.assert_close(normed * model.model.norm.weight.detach(), final, **close)
        assert rows.greedy_ids.tolist() == theirs.logits[0].argmax(-1).tolist()


def test_a_layer_that_the_target_has_not_is_refused(tmp_path: Path) -> None:
    """Guards states of nothing, which a draft would be trained on."""
    checkpoint = open_model(make_checkpoint(tmp_path))
    for tap in (-1, 3):
        with pytest.raises(ValueError, match=rf"taps: {tap} is not from 0 to 2"):
            EngineTeacher(checkpoint, taps=(0, tap), max_length=16)


def test_the_fingerprint_changes_with_any_weight(tmp_path: Path) -> None:
    """Guards states of an older checkpoint of the same name."""
    checkpoint = open_model(make_checkpoint(tmp_path))
    weights = DecoderWeights.allocate(checkpoint.config, torch.float32, torch.device("cpu"))
    load_weights(
        weights.destinations(checkpoint.config), checkpoint.source, config=checkpoint.config
    )
    before = fingerprint(weights, checkpoint.config)
    assert describe_target("x", checkpoint.config, weights).fingerprint == before
    weights.layers[1].post_norm[3] += 0.5
    assert fingerprint(weights, checkpoint.config) != before
