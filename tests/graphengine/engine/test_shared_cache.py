"""One cache folder for engines that differ in one thing: each gives what it gives alone (case 15).

Also within an engine: greedy batches, then mixed ones, then a step without drafts, back and forth.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphengine.engine import Engine
from graphengine.sampling.params import SamplingParams
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Setup

SETUP = Setup(k=3, max_num_seqs=3, num_reqs=(3,), draft_lengths=(1,), numerics="fast")
PARAMS = [
    SamplingParams(max_tokens=16, ignore_eos=True),
    SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.8, seed=3),
    SamplingParams(max_tokens=16, ignore_eos=True, logprobs=2),
]
Options = dict[str, Any]


def variants(checkpoints: Checkpoints) -> list[tuple[str, Setup, Options]]:
    """(target, setup, options of the proposer), each of which differs from the first in one."""
    llama, eagle3 = str(checkpoints.get()), str(checkpoints.get("eagle3"))
    draft = {"method": "draft_model", "model": llama}
    return [
        ("llama", SETUP, draft),
        ("llama", replace(SETUP, k=5), draft),
        ("llama", SETUP, {"method": "eagle", "model": eagle3}),
        ("llama", SETUP, {**draft, "draft_sampling": "coupled"}),
        ("llama", SETUP, {**draft, "model": str(checkpoints.get("loopy"))}),
        ("llama", replace(SETUP, dtype="bfloat16"), draft),
        ("llama", replace(SETUP, block_size=8), draft),
        ("llama", replace(SETUP, max_model_len=48), draft),
        ("llama", replace(SETUP, verification="rejection"), draft),
        ("llama", replace(SETUP, logits_processors=True), draft),
        ("llama", replace(SETUP, compile="off"), draft),
        ("loopy", SETUP, draft),
        ("llama", SETUP, {"method": "ngram"}),
        ("llama", replace(SETUP, k=0, draft_lengths=None), {}),
    ]


def serve(engine: Engine) -> list[Any]:
    """Drafts, logits and streams of batches in every tier, with and without drafts."""
    harness, found = Harness(engine, keep_logits=True), []
    limits = (engine.draft_limit, 0, min(1, engine.draft_limit), engine.draft_limit)
    for turn, limit in enumerate(limits):
        engine.draft_limit = limit
        for index, params in enumerate(PARAMS[: 1 + turn % 3]):
            harness.add(f"{turn}-{index}", [3 + turn, 5, 7 * index, 5, 7 * index], params)
        harness.drain()
    found += [harness.streams(name) for name in harness.requests]
    found += [(place, row.tobytes()) for place, row in sorted(harness.logits.items())]
    found.append(engine.stats().num_accepted_tokens)
    engine.close()
    return found


def test_engines_that_share_a_cache_folder(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass, a library or a piece of one engine served to another: shared, as alone."""
    given = variants(checkpoints)
    found: list[list[Any]] = [[], []]
    for target, setup, options in given:  # without the probe a start reads no entry
        found[0].append(serve(setup.start(checkpoints.get(target), **options)))
    monkeypatch.setenv("GRAPHENGINE_CACHE_DIR", str(tmp_path / "shared"))
    for target, setup, options in given:
        engine = replace(setup, numerics="invariant").start(checkpoints.get(target), **options)
        found[1].append(serve(engine))
    for one, alone, shared in zip(given, *found, strict=True):
        assert shared == alone, one
    target, setup, options = given[0]
    again = replace(setup, numerics="invariant").start(checkpoints.get(target), **options)
    assert again.start_times.cached["numerics"]
    assert serve(again) == found[0][0]
