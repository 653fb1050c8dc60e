"""Graph kinds on the device, bit for bit: a CUDA graph, the same ops from Python, their tape.

Every kind runs the same schedule in debug mode, which fills with NaN what a step has to write and
what nobody may read; streams and the logits of every verified row are compared. Cases 10, 12 and 13
of replay: rows of padding, batches that shrink, drafts between a step and its readers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import pytest

from graphengine.sampling.params import SamplingParams
from tests.gpu.device import ENGINES, TARGET, DeviceSetup, cases, draft_options
from tests.graphengine.engine.harness import Harness, Job
from tests.graphengine.engine.setups import scripted

pytestmark = pytest.mark.parity

KINDS = {"cpu": ("tape", "eager"), "cuda": ("cuda", "eager", "compiled", "tape")}
BASE = DeviceSetup(
    k=4, max_num_seqs=10, num_reqs=(1, 2, 4, 8), draft_lengths=(0, 1, 2, 4), max_model_len=96,
    block_size=8, dtype="bfloat16", attention="triton", debug=True, prefix=False,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """What a kind of graph came to."""

    streams: dict[str, list[int]]
    logits: dict[tuple[str, int], bytes]
    batch_sizes: list[int]


def of_kind(setup: DeviceSetup, kind: str) -> DeviceSetup:
    field = "launch" if setup.device == "cuda" else "graph"
    return replace(setup, **{field: kind})


def play(setup: DeviceSetup, jobs: list[Job], **options: Any) -> Run:
    """The schedule through one engine."""
    engine = setup.start(TARGET, **options)
    harness = Harness(engine, keep_logits=True)
    harness.run(jobs)
    assert engine.runner.manager.kind == (setup.launch if setup.device == "cuda" else setup.graph)
    streams = {job.request_id: harness.stream(job.request_id) for job in jobs}
    logits = {place: row.tobytes() for place, row in harness.logits.items()}
    engine.close()
    return Run(streams, logits, harness.batch_sizes)


def shrinking() -> list[Job]:
    """Ten at once, the longest texts first; then 8, 7, 3, 1 and, with three more, 4."""
    lengths = [3, 3, 8, 12, 12, 12, 12, 17, 17, 40]
    jobs = [
        Job(
            request_id=str(index),
            prompt=tuple((7 * index + 3 * place) % 250 for place in range(30 - 2 * index)),
            params=SamplingParams(max_tokens=length, ignore_eos=True),
        )
        for index, length in enumerate(lengths)
    ]
    late = [replace(jobs[index], request_id=f"late-{index}", arrives=26) for index in range(3)]
    return [*jobs, *late]


def empty_steps(setup: DeviceSetup) -> DeviceSetup:
    """One token a step, so that batches have the sizes that the schedule says."""
    return replace(setup, k=0, draft_lengths=None)


@pytest.mark.parametrize("device", ENGINES)
def test_batches_that_shrink(device: str) -> None:
    """Case 12: rows of an earlier, larger batch that nobody overwrote."""
    plain = empty_steps(replace(BASE, device=device))
    runs = [play(of_kind(plain, kind), shrinking()) for kind in KINDS[device]]
    sizes = [size for size, _ in groupby(runs[0].batch_sizes)]
    assert sizes == [10, 8, 7, 3, 1, 4, 2, 1], sizes
    for kind, run in zip(KINDS[device], runs, strict=True):
        assert run.streams == runs[0].streams, kind
        assert run.logits == runs[0].logits, kind


@pytest.mark.parametrize(
    ("device", "name"), cases(["ragged", "eagle3"], ["ragged", "eagle3", "mtp", "draft_model"])
)
def test_ragged_drafts(device: str, name: str) -> None:
    """Another number of drafts for each request, in batches that shrink."""
    setup, jobs = replace(BASE, device=device), shrinking()
    plain = play(of_kind(empty_steps(setup), KINDS[device][0]), jobs)
    records = {job.request_id: [*job.prompt, *plain.streams[job.request_id]] for job in jobs}
    runs = []
    for kind in KINDS[device]:
        one = of_kind(setup, kind)
        if name == "ragged":
            options: dict[str, Any] = {"proposer": scripted("ragged", records, seed=3)}
        else:
            options = draft_options(name)
        runs.append(play(one, jobs, **options))
    for kind, run in zip(KINDS[device], runs, strict=True):
        assert run.streams == plain.streams, kind
        for place, logits in run.logits.items():
            if place in plain.logits:
                assert logits == plain.logits[place], (kind, place)


@pytest.mark.parametrize("device", ENGINES)
def test_padding_writes_to_no_live_slot(device: str) -> None:
    """Case 10: three requests in a cell of four, in a pool whose last block is taken.

    The harness holds every slot but those of the step's own rows to the bytes it had.
    """
    setup = replace(
        BASE, device=device, max_num_seqs=4, num_reqs=(4,), num_blocks=13, max_model_len=64
    )
    setup = of_kind(setup, KINDS[device][0])
    engine = setup.start(TARGET, **draft_options("eagle3"))
    harness = Harness(engine)
    for index in range(3):
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        harness.add(str(index), [index + 9] * 24, params)
    taken: set[int] = set()
    while engine.has_unfinished_requests():
        harness.step()
        for request in engine.scheduler.running:
            taken.update(request.block_table.block_ids)
    assert 12 in taken, "nobody had the last block"
    assert engine.stats().padding_rows > 0
    engine.close()


@pytest.mark.parametrize(("device", "name"), cases(["mtp"], ["eagle3", "mtp"]))
def test_drafts_between_a_step_and_its_readers(device: str, name: str) -> None:
    """Case 13: log-probabilities of prompts around the rows of one forward, drafts in between."""
    found = []
    for k in (0, 3):
        setup = replace(BASE, device=device, k=k, max_num_seqs=2, num_reqs=(2,), debug=False)
        setup = replace(setup, draft_lengths=None, max_model_len=300, block_size=16)
        setup = of_kind(setup, KINDS[device][0])
        options = draft_options(name) if k else {}
        harness = Harness(setup.start(TARGET, **options))
        for length in (255, 256, 257):
            prompt = [(5 * place + length) % 250 for place in range(length)]
            params = SamplingParams(max_tokens=8, ignore_eos=True, prompt_logprobs=3, logprobs=2)
            harness.add(str(length), prompt, params)
        harness.drain()
        answers = [harness.outputs[str(length)] for length in (255, 256, 257)]
        found.append([(one.prompt_logprobs, one.outputs[0].token_ids, one.outputs[0].logprobs)
                      for one in answers])  # fmt: skip
        harness.engine.close()
    assert found[0] == found[1]
