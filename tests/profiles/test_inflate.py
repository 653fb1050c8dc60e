"""Inflated targets: the same text, the same acceptance, and as many bytes as their shape has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from capture.config import CaptureConfig
from graphengine.bench.acceptance import Acceptance, measure_acceptance
from graphengine.config import CacheConfig, EngineConfig
from graphengine.engine import Engine
from graphengine.models.loader import open_model
from graphengine.sampling.params import SamplingParams
from graphengine.speculative_config import SpeculativeConfig
from profiles.inflate import PRESETS, Sizes, inflate
from profiles.inflate_heads import inflate_head

WEIGHTS = Path(__file__).parents[1] / "weights" / "tiny"
TARGET = WEIGHTS / "target"
PROMPTS = ["def main(argv):\n    ", "import os\n", "class Error(Exception):\n", "for i in range("]
TINY = Sizes(
    hidden_size=128,
    intermediate_size=384,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=264,
)
# Heads as wide as they were, and a ratio of widths that is a power of 4.
EXACT = replace(TINY, hidden_size=512, intermediate_size=500, num_layers=6, num_heads=16)
EXACT = replace(EXACT, num_kv_heads=4, vocab_size=300)
ROUNDED = replace(EXACT, hidden_size=256, head_dim=64)


@pytest.fixture(scope="module")
def inflated(tmp_path_factory: pytest.TempPathFactory) -> dict[Sizes, Path]:
    folder = tmp_path_factory.mktemp("inflated")
    sizes = {"exact": EXACT, "rounded": ROUNDED}
    return {one: inflate(TARGET, folder / name, one) for name, one in sizes.items()}


def serve(
    target: Path, *, dtype: str = "float32", **speculative: Any
) -> tuple[Acceptance, list[list[int]]]:
    config = EngineConfig(
        dtype=dtype,
        max_model_len=128,
        max_num_seqs=4,
        speculative=SpeculativeConfig(**speculative, adaptive=False) if speculative else None,
        capture=CaptureConfig(num_reqs=(4,)),
        cache=CacheConfig(num_blocks=40),
    )
    engine = Engine(target, config)
    assert engine.tokenizer is not None
    prompts = [engine.tokenizer.encode(text) for text in PROMPTS]
    params = [SamplingParams(max_tokens=48, ignore_eos=True)] * len(prompts)
    found = measure_acceptance(engine, prompts, params, batch_size=4)
    engine.close()
    return found


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    # Rows of other scales round to other bf16 values, so near ties of the rounded shape may flip.
    [(EXACT, "float32"), (EXACT, "bfloat16"), (ROUNDED, "float32")],
    ids=["exact", "exact-bfloat16", "rounded"],
)
def test_an_inflated_target_emits_the_same_tokens(
    sizes: Sizes, dtype: str, inflated: dict[Sizes, Path]
) -> None:
    """A padded channel that is written to, a head in another group, a rotation of another speed."""
    assert serve(inflated[sizes], dtype=dtype)[1] == serve(TARGET, dtype=dtype)[1]


@pytest.mark.parametrize("name", ["eagle1", "eagle3", "draft_model"])
def test_acceptance_is_unchanged(name: str, inflated: dict[Sizes, Path], tmp_path: Path) -> None:
    """A head that reads other channels than it was trained on: no token would show it."""
    head = tmp_path / name
    if name == "draft_model":
        small = Sizes.of(open_model(WEIGHTS / name).config)
        inflate(WEIGHTS / name, head, replace(small, vocab_size=EXACT.vocab_size))
    else:
        inflate_head(WEIGHTS / name, head, EXACT)
    method = "eagle" if name.startswith("eagle") else name
    plain, streams = serve(TARGET, method=method, model=WEIGHTS / name, max_draft_tokens=3)
    found, same = serve(inflated[EXACT], method=method, model=head, max_draft_tokens=3)
    assert sum(plain.accepted_per_position) > 0
    assert found == plain
    assert same == streams


def test_logits_of_an_exact_shape_are_the_same_bits(inflated: dict[Sizes, Path]) -> None:
    """What the module calls exact."""
    rows = []
    for target in (TARGET, inflated[EXACT]):
        config = EngineConfig(dtype="float32", max_model_len=64, max_num_seqs=1)
        engine = Engine(target, config)
        engine.add_request("a", list(range(40)), SamplingParams(max_tokens=2, ignore_eos=True))
        engine.step()
        engine.step()
        key = engine.runner.manager.dispatch(1, 0, "greedy")
        rows.append(engine.runner.last_logits(key)[0, 0, : TINY.vocab_size].clone())
        engine.close()
    assert torch.equal(rows[0], rows[1])


def test_bytes_are_those_of_the_shape(inflated: dict[Sizes, Path]) -> None:
    """A floor that counts other bytes than a step reads."""
    for sizes, folder in inflated.items():
        engine = Engine(folder, EngineConfig(max_model_len=64, max_num_seqs=1))
        assert engine.runner.decoder.weights.num_bytes == sizes.weight_bytes()
        engine.close()
    large = PRESETS["8b"]
    assert large.weight_bytes() == 2 * 8_029_995_008 + 4 * 65 * 4096
    head = large.vocab_size * large.hidden_size
    step = large.step_bytes(num_reqs=1, kv_len=0)
    assert step == 2 * (8_029_995_008 - head)
    token = 2 * 8 * 128 * 32 * 2
    assert large.step_bytes(num_reqs=4, kv_len=100) == step + 400 * token


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hidden_size=64: the model has 128"):
        inflate(TARGET, tmp_path, replace(EXACT, hidden_size=64))
    with pytest.raises(ValueError, match="expected no fewer, and a multiple"):
        inflate(TARGET, tmp_path, replace(EXACT, head_dim=48))
    assert not (tmp_path / "config.json").exists()
