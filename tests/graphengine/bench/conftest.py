"""A tiny engine whose drafts are scripted, shared by the tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from graphengine.config import CacheConfig, EngineConfig
from graphengine.engine import Engine
from graphengine.speculative_config import SpeculativeConfig
from proposers.mock import RaggedProposer
from tests.tiny import VOCAB_SIZE, make_checkpoint

CONFIG = EngineConfig(
    dtype="float32",
    max_model_len=256,
    max_num_seqs=2,
    speculative=SpeculativeConfig("ngram", max_draft_tokens=3, adaptive=False),
    cache=CacheConfig(enable_prefix_caching=False),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def engine(checkpoint: Path) -> Iterator[Engine]:
    """Up to 3 drafts a step, nearly all of them wrong."""
    engine = Engine(checkpoint, CONFIG, proposer=RaggedProposer(vocab_size=VOCAB_SIZE))
    yield engine
    engine.close()
