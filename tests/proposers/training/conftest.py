"""A target of random numbers, and one that runs: a tiny checkpoint with the engine as teacher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from graphengine.distill import EngineTeacher, describe_target
from graphengine.models.loader import open_model
from proposers.training import CorpusConfig, LayerSizes, Piece, Target, read_corpus
from proposers.training.batches import Batch
from tests.tiny import make_model, make_tokenizer

SIZES = LayerSizes(
    hidden_size=24,
    intermediate_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=100.0,  # angles that matter at small positions
)
VOCAB_SIZE = 40
TAPS = (0, 1, 2)


def make_target() -> Target:
    """Random matrices; nothing runs it."""
    draw = torch.Generator().manual_seed(1)
    return Target(
        name="tiny",
        fingerprint="tiny",
        architecture="LlamaForCausalLM",
        sizes=SIZES,
        num_layers=2,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=64,
        eos_token_ids=(3,),
        embed=torch.randn(VOCAB_SIZE, SIZES.hidden_size, generator=draw),
        final_norm=1 + 0.2 * torch.randn(SIZES.hidden_size, generator=draw),
        lm_head=torch.randn(VOCAB_SIZE, SIZES.hidden_size, generator=draw),
    )


def make_batch(lengths: Sequence[int], *, first: int = 0) -> Batch:
    """Random rows, padded as pieces are."""
    draw = torch.Generator().manual_seed(2)
    shape, hidden = (len(lengths), max(lengths)), SIZES.hidden_size
    positions = torch.arange(shape[1])
    real = positions < torch.tensor(lengths)[:, None]
    return Batch(
        token_ids=torch.randint(VOCAB_SIZE, shape, generator=draw) * real,
        counts=real & (positions >= first),
        greedy_ids=torch.randint(VOCAB_SIZE, shape, generator=draw) * real,
        aux=torch.randn(*shape, len(TAPS) * hidden, generator=draw) * real[..., None],
        final=torch.randn(*shape, hidden, generator=draw) * real[..., None],
    )


@dataclass(frozen=True, slots=True)
class Taught:
    """A tiny target that runs, and a corpus in its tokens."""

    target: Target
    teacher: EngineTeacher
    pieces: list[Piece]


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some files of words."""
    folder = tmp_path_factory.mktemp("texts")
    words = ["the", "cat", "sat", "on", "the", "mat", "then", "it", "ate", "other", "that"]
    draw = torch.Generator().manual_seed(3)
    for number in range(60):
        chosen = torch.randint(len(words), (20,), generator=draw).tolist()
        text = " ".join(words[index] for index in chosen)
        (folder / f"{number:02d}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def teach(
    tmp_path_factory: pytest.TempPathFactory, texts: Path
) -> Callable[[tuple[int, ...]], Taught]:
    """Makes a `Taught` with these taps."""
    folder = tmp_path_factory.mktemp("target")
    model = make_model("llama")
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # or all its tokens would be equally likely
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    checkpoint = open_model(folder)
    tokenizer = checkpoint.load_tokenizer()
    assert tokenizer is not None
    config = CorpusConfig(length=48, held_out=0.2)
    vocab_size = checkpoint.config.vocab_size
    pieces = read_corpus([texts], [], tokenizer.encode, config, vocab_size=vocab_size)

    def make(taps: tuple[int, ...]) -> Taught:
        teacher = EngineTeacher(checkpoint, taps=taps, max_length=48)
        target = describe_target("tiny", checkpoint.config, teacher.weights)
        return Taught(target, teacher, pieces)

    return make
