"""Every batch has its captured cell, and padding never keeps what an earlier batch left.

Cases 10, 12, 15 and 16. That padding holds its declared fill, and that nothing is written outside
a step's own rows, is checked by the harness before and after every step here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from graphengine.sampling.params import SamplingParams
from proposers.base import Draft, ProposeInputs
from proposers.mock import MockProposer
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.harness import Harness, Job
from tests.graphengine.engine.setups import Compile, Graph, Setup, scripted, with_torch_ops
from tests.tiny import VOCAB_SIZE

LONG = SamplingParams(max_tokens=None, ignore_eos=True)


class FixedLength(MockProposer):
    """Junk of exactly `length` tokens."""

    name = "mock-fixed-length"

    def __init__(self) -> None:
        super().__init__(vocab_size=VOCAB_SIZE)
        self.length = 0

    def propose(self, inputs: ProposeInputs) -> Draft:
        lengths = np.minimum(inputs.num_draft_tokens, self.length)
        self.num_proposals += 1
        return Draft.from_rows([[VOCAB_SIZE - 1] * n for n in lengths.tolist()], inputs.k)


@pytest.mark.parametrize(
    ("max_num_seqs", "k", "ladder"), [(6, 6, None), (11, 3, None), (1, 3, None), (3, 8, (4,))]
)
def test_the_whole_grid_replays_captured_cells(
    max_num_seqs: int, k: int, ladder: tuple[int, ...] | None, checkpoints: Checkpoints
) -> None:
    """Batches that silently run eager, for which no cell was captured (case 16)."""
    setup = Setup(k=k, max_num_seqs=max_num_seqs, max_model_len=512, draft_lengths=ladder)
    proposer = FixedLength()
    harness = Harness(setup.start(checkpoints.get(), proposer), poison=False)
    engine = harness.engine
    table = engine.resolved.table
    captured = set(engine.stats().capture_seconds)
    assert captured == {str(key) for key in table}
    expected: dict[str, int] = {}
    for num_reqs in range(1, max_num_seqs + 1):
        harness.add(str(num_reqs), [num_reqs], LONG)
        for proposer.length in range(k + 1):
            harness.step()
            key = table.dispatch(num_reqs, proposer.length, "greedy")
            assert key.num_reqs >= num_reqs
            assert key.query_len >= proposer.length + 1
            expected[str(key)] = expected.get(str(key), 0) + 1
    stats = engine.stats()
    assert {name: n for name, n in stats.replays.items() if n} == expected
    assert set(stats.eager_fallbacks) == {"proposer:mock-fixed-length"}
    assert harness.batch_sizes == [n for n in range(1, max_num_seqs + 1) for _ in range(k + 1)]


def test_every_static_buffer_holds_the_largest_cell(checkpoints: Checkpoints) -> None:
    """A buffer smaller than the padded batch, which would return short slices (case 16)."""
    for max_num_seqs, k in ((6, 6), (33, 3), (1, 3)):
        setup = Setup(k=k, max_num_seqs=max_num_seqs, graph="eager")
        engine = setup.start(checkpoints.get())
        buffers = engine.runner.buffers
        largest = next(iter(engine.resolved.table))
        assert largest.num_tokens == max_num_seqs * (k + 1)
        for name, view in buffers.cell(largest).items():
            spec = buffers.specs[name]
            expected = spec.resolve(
                num_reqs=largest.num_reqs,
                num_tokens=largest.num_tokens,
                query_len=largest.query_len,
            )
            assert tuple(view.shape) == expected
        engine.close()


@pytest.mark.parametrize("graph", ["tape", "compiled"])
@with_torch_ops
def test_a_batch_that_shrinks_and_grows(
    graph: Graph, compile_mode: Compile, checkpoints: Checkpoints
) -> None:
    """Rows of a larger batch left in the padding of a smaller one: 8, 7, 3, 1, 4 (case 12).

    The longest leave first, so that stale positions would be large ones.
    """
    setup = Setup(
        k=3,
        max_num_seqs=8,
        compile=compile_mode,
        graph=graph,
        debug=graph == "tape",
        num_reqs=(2, 4, 8),
    )
    jobs = []
    for index in range(8):
        lengths = (40, 33, 30, 28, 25, 20, 18, 2)
        leaves = (4, 6, 6, 6, 6, 8, 8, 14)[index]  # 8 -> 7 -> 3 -> 1
        prompt = tuple((11 * index + i) % 256 for i in range(lengths[index]))
        jobs.append(Job(request_id=f"a{index}", prompt=prompt, params=LONG, aborts=leaves))
    for index in range(3):
        jobs.append(Job(request_id=f"b{index}", prompt=(5, index), params=LONG, arrives=10))
    off = Harness(replace(setup, k=0, prefix=False).start(checkpoints.get()))
    for job in jobs:
        off.add(job.request_id, job.prompt, LONG)
    off.drain()
    harness = Harness(setup.start(checkpoints.get(), scripted("ragged", {}, seed=1)))
    harness.run(jobs)
    sizes = [
        n for n, m in zip(harness.batch_sizes, [0, *harness.batch_sizes], strict=False) if n != m
    ]
    assert [n for n in sizes if n in (8, 7, 3, 1, 4)][:4] == [8, 7, 3, 1]
    assert 4 in sizes
    for job in jobs:
        stream = harness.stream(job.request_id)
        assert stream == off.stream(job.request_id)[: len(stream)]
    for index in range(3):
        assert harness.stream(f"b{index}") == off.stream(f"b{index}")


@with_torch_ops
def test_padding_leaves_a_full_pool_alone(compile_mode: Compile, checkpoints: Checkpoints) -> None:
    """Padding rows that write to the last block, to block 1, or to row 0's blocks (case 10).

    Three requests in a cell of four, k + 1 wide, own every block of the pool.
    """
    setup = Setup(k=3, num_blocks=1 + 12, compile=compile_mode, prefix=False, num_reqs=(4,))
    harness = Harness(setup.start(checkpoints.get(), scripted("junk", {})))
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    for index in range(3):
        harness.add(str(index), [(17 * index + i) % 256 for i in range(13)], params)
    owned: set[int] = set()
    while harness.engine.has_unfinished_requests():
        harness.step()
        for request in harness.engine.scheduler.running:
            owned.update(request.block_table.block_ids)
    assert owned == set(range(1, 13))
    assert harness.engine.stats().replays["4x4:greedy"] > 0
    assert harness.engine.stats().padding_rows > 0


@pytest.mark.parametrize("ks", [(3, 5), (5, 3)])
def test_engines_of_other_widths_side_by_side(ks: Sequence[int], checkpoints: Checkpoints) -> None:
    """A compiled piece or cell reused although the draft length differs (case 15)."""
    off = Harness(Setup().start(checkpoints.get()))
    off.add("a", [3, 4], LONG)
    off.drain()
    records = {"a": [3, 4, *off.stream("a")]}
    harnesses = [
        Harness(Setup(k=k).start(checkpoints.get(), scripted("oracle", records))) for k in ks
    ]
    for harness in harnesses:
        harness.add("a", [3, 4], LONG)
    while any(harness.engine.has_unfinished_requests() for harness in harnesses):
        for harness in harnesses:
            if harness.engine.has_unfinished_requests():
                harness.step()
    for harness in harnesses:
        assert harness.stream("a") == off.stream("a")
        assert harness.engine.stats().acceptance_rate == 1.0


def test_capturing_again_needs_no_more_buffers(checkpoints: Checkpoints) -> None:
    """Graph memory that grows with the number of cells or with the engine's history (case 57)."""
    sizes = {}
    for max_num_seqs in (1, 4, 16):
        engine = Setup(k=3, max_num_seqs=max_num_seqs).start(checkpoints.get())
        stats = engine.stats()
        sizes[max_num_seqs] = (engine.runner.buffers.num_bytes, sum(stats.capture_bytes.values()))
        again = Setup(k=3, max_num_seqs=max_num_seqs).start(checkpoints.get())
        assert again.runner.buffers.num_bytes == engine.runner.buffers.num_bytes
        assert again.stats().capture_bytes == stats.capture_bytes
        cells = len(engine.resolved.table)
        largest = next(iter(engine.resolved.table))
        whole = sum(view.nbytes for view in engine.runner.buffers.cell(largest).values())
        prefill = engine.runner.buffers.prefill(num_reqs=max(2, max_num_seqs), num_tokens=256)
        assert sizes[max_num_seqs][0] <= whole + sum(view.nbytes for view in prefill.values())
        assert sizes[max_num_seqs][1] < cells * (1 << 14)
        assert torch.is_tensor(engine.runner.last_logits(largest))
        engine.close()
        again.close()
