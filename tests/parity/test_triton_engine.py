"""An engine whose steps are Triton kernels, interpreted: the same streams, on and off, and probed.

Tiny models in float32. What only a GPU can show (bf16, real graphs) is in tests/gpu.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphengine.numerics import check_row_invariance
from graphengine.sampling.params import SamplingParams
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Setup, scripted

SETUP = Setup(
    k=2,
    max_num_seqs=2,
    max_model_len=48,
    block_size=4,
    num_blocks=30,
    compile="triton",
    numerics="fast",  # probed below
    debug=True,
    num_reqs=(2,),
    draft_lengths=(2,),
)
PROMPTS = ((1, 2, 3, 4, 5, 6, 1, 2, 3), (9, 8, 7))
PARAMS = (
    SamplingParams(max_tokens=4, logprobs=2),
    SamplingParams(
        max_tokens=4, temperature=0.9, seed=3, top_k=20, top_p=0.9, repetition_penalty=1.2
    ),
)

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of poisoned scratch
]


def streams(checkpoint: Path, setup: Setup, proposer: Any = None, **options: Any) -> list[Any]:
    harness = Harness(setup.start(checkpoint, proposer, **options))
    for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        harness.add(str(index), prompt, params)
    harness.drain()
    accepted = harness.engine.stats().num_accepted_tokens
    found = [harness.stream(str(index)) for index in range(len(PROMPTS))]
    harness.engine.close()
    return [*found, accepted]


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        pytest.param("qwen3", marks=pytest.mark.slow),
        pytest.param("window", marks=pytest.mark.slow),
    ],
)
def test_streams_do_not_depend_on_drafts(name: str, checkpoints: Checkpoints) -> None:
    """A kernel that is wrong in an engine though its own test passes: sizes, tables, order."""
    checkpoint = checkpoints.get(name)
    off = replace(SETUP, k=0, draft_lengths=None)
    *plain, _ = streams(checkpoint, off)
    *native, _ = streams(checkpoint, replace(off, compile="auto"))
    assert plain == native  # other sums; so wide apart are the logits of these models
    records = {str(i): [*p, *s] for i, (p, s) in enumerate(zip(PROMPTS, plain, strict=True))}
    *ragged, accepted = streams(checkpoint, SETUP, scripted("ragged", records, seed=1))
    assert ragged == plain
    assert accepted > 0


def test_drafts_of_a_model_change_nothing(checkpoints: Checkpoints) -> None:
    """A chain of Triton kernels that writes to the target's rows, or drafts nothing."""
    checkpoint = checkpoints.get("near")
    off = replace(SETUP, k=0, draft_lengths=None)
    *plain, _ = streams(checkpoint, off)
    head = checkpoints.get("echo")
    *found, accepted = streams(checkpoint, SETUP, method="eagle", model=str(head))
    assert found == plain
    assert accepted > 1, "a head that is perfect for this target"


def test_rows_are_invariant(checkpoints: Checkpoints, tmp_path: Path, monkeypatch: Any) -> None:
    """A row's bits that depend on what shares its launch."""
    monkeypatch.setenv("GRAPHENGINE_CACHE_DIR", str(tmp_path))
    runner = SETUP.start(checkpoints.get("qwen3")).runner
    report = check_row_invariance(
        runner.decoder, runner.opset, runner.verifier_shape, row_counts=[1, 2, 5], max_model_len=48
    )
    assert not report.cached
