"""Every batch has its captured cell, and padding never keeps what an earlier batch left.

Cases 10, 12, 15 and 16. That padding holds its declared fill, and that nothing is written outside
a step's own rows, is checked by the harness before and after every step here.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from graphengine.captured_step import make_buffers
from graphengine.models.loader import open_model
from graphengine.request_state import MAX_STOP_IDS
from graphengine.resolve import resolve
from graphengine.sampling.params import SamplingParams
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.fixed_length import FixedLength
from tests.graphengine.engine.harness import Harness, Job
from tests.graphengine.engine.setups import Compile, Graph, Setup, scripted, with_torch_ops
from tests.tiny import VOCAB_SIZE

LONG = SamplingParams(max_tokens=None, ignore_eos=True)


@pytest.mark.parametrize(
    ("max_num_seqs", "k", "ladder"),
    [(6, 6, None), (33, 3, None), (11, 3, None), (1, 3, None), (3, 8, (4,))],
)
def test_the_whole_grid_replays_captured_cells(
    max_num_seqs: int, k: int, ladder: tuple[int, ...] | None, checkpoints: Checkpoints
) -> None:
    """Batches that silently run eager, for which no cell was captured (case 16)."""
    setup = Setup(k=k, max_num_seqs=max_num_seqs, max_model_len=512, draft_lengths=ladder)
    setup = replace(setup, graph="tape" if max_num_seqs < 20 else "compiled", block_size=16)
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


@pytest.mark.parametrize(
    ("max_num_seqs", "k", "rows"), [(6, 6, 42), (33, 3, 132), (33, 9, 330), (1, 3, 4)]
)
def test_every_static_buffer_holds_the_largest_cell(
    max_num_seqs: int, k: int, rows: int, checkpoints: Checkpoints
) -> None:
    """A buffer smaller than the padded batch, which would return short slices (case 16)."""
    config = Setup(k=k, max_num_seqs=max_num_seqs, max_model_len=64, block_size=4).config()
    resolved = resolve(open_model(checkpoints.get()).config, config)
    assert next(iter(resolved.table)).num_tokens == rows
    model = resolved.model
    elements = {
        **dict.fromkeys(("token_ids", "positions", "slot_mapping", "target_ids"), rows),
        "draft_token_ids": rows,
        **dict.fromkeys(("hidden", "normed"), rows * model.hidden_size),
        "qkv": rows * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim,
        "attended": rows * model.num_heads * model.head_dim,
        "activated": rows * model.intermediate_size,
        **dict.fromkeys(("logits", "processed"), rows * VOCAB_SIZE),
        "mask": rows * VOCAB_SIZE // 32,
        **dict.fromkeys(("logprob_ids", "logprob_values"), rows * 21),
        "logprob_ranks": rows,
        "query_len": 1,
        "query_start_loc": max_num_seqs + 1,
        "block_table": max_num_seqs * 64 // 4,
        **dict.fromkeys(("num_draft_tokens", "max_new_tokens", "state_rows"), max_num_seqs),
        **dict.fromkeys(("allowed_drafts", "most_new_tokens"), max_num_seqs),
        "stop_ids": max_num_seqs * MAX_STOP_IDS,
        "packed": max_num_seqs * (k + 3),
    }
    buffers = make_buffers(model, resolved.sizes, torch.device("meta"))
    assert set(buffers.specs) == set(elements), "count the new buffer here, too"
    for name, least in elements.items():
        assert buffers.whole(name).numel() >= least, f"{name} is too small"


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


def test_more_cells_need_no_more_memory_each(checkpoints: Checkpoints) -> None:
    """Buffers or graphs that grow with the number of cells (case 57)."""
    few = Setup(k=6, max_num_seqs=16, num_reqs=(16,), draft_lengths=(6,))
    many = replace(few, num_reqs=tuple(range(1, 17)), draft_lengths=tuple(range(7)))
    cells, buffers, largest = [], [], []
    for setup in (few, many):
        engine = setup.start(checkpoints.get())
        sizes = engine.stats().capture_bytes
        cells.append(len(sizes))
        buffers.append(engine.runner.buffers.num_bytes)
        largest.append(max(sizes.values()))
        engine.close()
    assert cells == [3 * 2, 3 * 16 * 7]  # in three tiers
    assert buffers[0] == buffers[1]
    assert largest[0] == largest[1] > 0


def test_capturing_again_returns_to_the_same_memory(checkpoints: Checkpoints) -> None:
    """A second capture that adds to the first one's buffers, graphs or figures (case 57)."""
    engine = Setup(k=3).start(checkpoints.get(), scripted("ragged", {}, seed=1))
    harness, manager = Harness(engine), engine.runner.manager
    harness.add("before", [3, 4, 5], LONG)
    harness.drain()
    graphs = [weakref.ref(graph) for graph in manager._graphs.values()]
    addresses, num_bytes = dict(engine.runner.buffers.addresses()), engine.stats().capture_bytes
    engine.runner.capture()
    assert len(graphs) == len(engine.resolved.table)
    assert [graph() for graph in graphs] == [None] * len(graphs), "graphs of the first capture live"
    assert engine.runner.buffers.addresses() == addresses
    assert engine.stats().capture_bytes == num_bytes
    harness.add("after", [3, 4, 5], LONG)
    harness.drain()
    assert harness.stream("after") == harness.stream("before")
