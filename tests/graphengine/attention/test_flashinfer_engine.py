"""An engine with FlashInfer's wrapper over the double: lengths and tables of real steps.

The kernels of the double are the reference, the rest of the step is native, so that the streams
have to be those of the native engine. Every KV slot starts as a large number: what reads a slot
that it has no business with changes a stream.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from graphengine.attention.base import AttentionShape
from graphengine.attention.flashinfer import FlashInferAttention, FlashInferSizes
from graphengine.native_opset import NativeOpSet
from tests.graphengine.attention.flashinfer_double import NativeDouble
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Graph, Setup, scripted
from tests.parity.workload import answer_off, check_identity, make_jobs

MAX_NUM_SEQS, K, MAX_MODEL_LEN, BLOCK = 8, 3, 64, 4
SIZES = FlashInferSizes(
    cells=frozenset((num_reqs, rows) for num_reqs in (1, 2, 4, 8) for rows in (1, 2, 3, 4)),
    max_num_reqs=64,
    max_num_rows=2048,
    max_blocks=MAX_MODEL_LEN // BLOCK,
)


def use_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ops of the CPU have this attention."""

    def attention(self: NativeOpSet, shape: AttentionShape) -> FlashInferAttention:
        return FlashInferAttention(self.dtype, shape, SIZES, device=self.device)

    monkeypatch.setattr(NativeOpSet, "attention", attention)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints")).get("llama")


@pytest.mark.parity
@pytest.mark.parametrize(
    ("proposer", "graph", "num_blocks"),
    [("ragged", "tape", None), ("oracle", "compiled", 34), ("junk", "eager", None)],
)
def test_streams_are_those_of_native_attention(
    native: NativeDouble,
    monkeypatch: pytest.MonkeyPatch,
    checkpoint: Path,
    proposer: str,
    graph: Graph,
    num_blocks: int | None,
) -> None:
    """Ragged drafts, padding, chunks, cache hits, preemption, aborts and the context limit."""
    setup = Setup(
        k=K,
        graph=graph,
        block_size=BLOCK,
        num_blocks=num_blocks,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
        budget=24,
    )
    answers = answer_off(checkpoint, Setup(max_model_len=MAX_MODEL_LEN, prefix=False))
    jobs, expected = make_jobs(answers, seed=3, num_requests=14)
    records = {request_id: answer.stream for request_id, answer in expected.items()}
    use_flashinfer(monkeypatch)
    engine = setup.start(checkpoint, scripted(proposer, records, seed=3))
    for cache in engine.runner.decoder.kv_caches:
        cache.fill_(1e6)
    harness = Harness(engine, poison=False)
    harness.run([replace(job, arrives=job.arrives // 6) for job in jobs])  # they crowd
    check_identity(harness, expected)
    assert set(harness.batch_sizes) >= {1, 3}, "padding and shrinking were not met"
    assert SIZES.max_num_reqs in {call["batch_size"] for call in native.plans}, "no prefill"
    assert all(torch.isfinite(cache).all() for cache in engine.runner.decoder.kv_caches)
    engine.close()
