"""Setups: an engine's configuration as one flat record, and the scripted proposers by name.

Knows how to build; running is the harness's. Flat, so that tests can sweep one field at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from capture.config import CaptureConfig
from graphengine.config import CacheConfig, EngineConfig
from graphengine.engine import Engine
from graphengine.speculative_config import SpeculativeConfig
from proposers import registry
from proposers.base import Proposer
from proposers.mock import (
    AcceptExactly,
    EmptyProposer,
    JunkProposer,
    MockProposer,
    OracleProposer,
    RaggedProposer,
    Records,
)
from tests.tiny import VOCAB_SIZE

Graph = Literal["tape", "compiled", "eager"]
Compile = Literal["native", "inductor", "off"]

# For tests that take `compile_mode`: the C++ verifier, KV writes and layers, then torch's.
with_torch_ops = pytest.mark.parametrize("compile_mode", ["native", "off"], indirect=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """Everything that an engine test varies; `k` = 0: speculation off."""

    k: int = 0
    dtype: str = "float32"
    graph: Graph = "tape"
    compile: Compile = "native"
    block_size: int = 4
    num_blocks: int | None = None
    max_num_seqs: int = 4
    max_model_len: int = 64
    budget: int | None = None
    chunked: bool = True
    prefix: bool = True
    debug: bool = False
    numerics: Literal["invariant", "fast"] = "invariant"
    draft_lengths: tuple[int, ...] | None = None
    num_reqs: tuple[int, ...] | None = None
    lazy: bool = False
    logits_processors: bool = False
    verification: Literal["exact", "rejection"] = "exact"

    def config(self, method: str = "ngram", **options: Any) -> EngineConfig:
        """The engine's own form of it."""
        # A fixed length, so that what is drafted can be foretold.
        options = {"verification": self.verification, "adaptive": False, **options}
        if registry.find(method).info.model != "none":
            options.setdefault("self_check", "off")  # random weights draft near chance
        speculative = (
            SpeculativeConfig(method, max_draft_tokens=self.k, **options) if self.k else None
        )
        return EngineConfig(
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
            numerics=self.numerics,
            logits_processors=self.logits_processors,
            speculative=speculative,
            capture=CaptureConfig(
                graph=self.graph,
                compile=self.compile,
                debug=self.debug,
                draft_lengths=self.draft_lengths,
                num_reqs=self.num_reqs,
                lazy=self.lazy,
            ),
            cache=CacheConfig(
                block_size=self.block_size,
                num_blocks=self.num_blocks,
                enable_prefix_caching=self.prefix,
                enable_chunked_prefill=self.chunked,
            ),
        )

    def start(self, checkpoint: Path, proposer: Proposer | None = None, **options: Any) -> Engine:
        """A captured engine; without a proposer it drafts n-grams where k > 0."""
        return Engine(checkpoint, self.config(**options), proposer=proposer)


def scripted(
    name: str,
    records: Records,
    *,
    accept: int = 0,
    seed: int = 0,
    vocab_size: int = VOCAB_SIZE,
) -> MockProposer:
    """A scripted proposer by its short name."""
    if name == "exactly":
        return AcceptExactly(accept, vocab_size=vocab_size, records=records)
    if name == "ragged":
        return RaggedProposer(vocab_size=vocab_size, records=records, seed=seed)
    kinds = {"oracle": OracleProposer, "junk": JunkProposer}
    if name in kinds:
        return kinds[name](vocab_size=vocab_size, records=records)
    assert name == "empty", f"no scripted proposer {name!r}"
    return EmptyProposer(vocab_size=vocab_size)
