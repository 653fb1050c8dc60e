"""A small real step over static buffers: native kernels around torch pieces, as the engine has.

`logits = rms_norm(x) @ w.T`, doubled by a Python op, argmax, then a per-request sum, so the tape is
native, python, native, python. `x` has one row a token; `valid` masks padding requests.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from capture.buffers import BufferSpec, StaticBuffers
from capture.config import CaptureConfig
from capture.graph import Graph
from capture.manager import CaptureManager
from capture.ops import PythonOp
from capture.shapes import ShapeKey, ShapeTable
from capture.stream import InlineStream
from capture.tape import TapeGraph
from graphengine.kernels import library
from graphengine.kernels.ops import native_op

Tensor = torch.Tensor
Views = Mapping[str, Tensor]

WIDTH, VOCAB = 16, 24
TIER = "greedy"
KEY = ShapeKey(2, 3, TIER)

SPECS = (
    BufferSpec(name="x", shape=("T", WIDTH), dtype=torch.float32, role="input"),
    BufferSpec(name="valid", shape=("R",), dtype=torch.int32, role="input", cells_only=True),
    # Nothing but a planted violation looks at this one, and no `prepare` varies it.
    BufferSpec(name="mode", shape=(1,), dtype=torch.int32, role="input", fill=7, cells_only=True),
    BufferSpec(name="normed", shape=("T", WIDTH), dtype=torch.float32, role="scratch"),
    BufferSpec(name="logits", shape=("T", VOCAB), dtype=torch.float32, role="output"),
    BufferSpec(name="ids", shape=("T",), dtype=torch.int32, role="output"),
    BufferSpec(name="sums", shape=("R",), dtype=torch.int64, role="output", cells_only=True),
)


def double(x: Tensor) -> None:
    torch.mul(x, 2, out=x)


def sum_requests(out: Tensor, ids: Tensor, valid: Tensor) -> None:
    out.copy_(ids.view(len(out), -1).sum(-1) * valid)


class Step:
    """The captured step; `calls` counts how often its Python ran."""

    def __init__(self) -> None:
        self.calls = 0
        self.norm_weight = torch.rand(WIDTH) + 0.5
        self.weight = torch.randn(VOCAB, WIDTH)
        self.eps = torch.tensor([1e-5])
        self.rms_norm = native_op("rms_norm")
        self.linear = native_op("linear_f32")
        self.argmax = native_op("argmax_rows")
        self.double = PythonOp("double", double)
        self.sum_requests = PythonOp("sum_requests", sum_requests)

    def __call__(self, views: Views) -> None:
        self.calls += 1
        self.norm(views)
        self.rest(views)

    def norm(self, views: Views) -> None:
        x = views["x"]
        self.rms_norm(views["normed"], x, self.norm_weight, len(x), WIDTH, self.eps)

    def rest(self, views: Views) -> None:
        normed, logits, ids = views["normed"], views["logits"], views["ids"]
        self.linear(logits, normed, self.weight, None, len(normed), VOCAB, WIDTH, 0)
        self.double(logits)
        self.argmax(ids, logits, len(logits), VOCAB)
        self.sum_requests(views["sums"], ids, views["valid"])


def make_buffers(*, max_num_seqs: int = 8, max_draft_tokens: int = 3) -> StaticBuffers:
    return StaticBuffers(
        SPECS,
        max_num_reqs=max_num_seqs,
        max_num_tokens=16,
        max_cell_tokens=max_num_seqs * (max_draft_tokens + 1),
        device=torch.device("cpu"),
    )


def fill_inputs(buffers: StaticBuffers, key: ShapeKey, num_reqs: int, seed: int) -> None:
    """Write a batch: random rows for live requests, the declared fill for the rest of the cell."""
    views = buffers.cell(key)
    generator = torch.Generator().manual_seed(seed)
    live = num_reqs * key.query_len
    views["x"][:live] = torch.randn(live, WIDTH, generator=generator)
    views["x"][live:] = buffers.specs["x"].fill
    views["valid"][:num_reqs] = 1
    views["valid"][num_reqs:] = buffers.specs["valid"].fill
    views["mode"].fill_(buffers.specs["mode"].fill)


def outputs(buffers: StaticBuffers, key: ShapeKey) -> dict[str, Tensor]:
    views = buffers.cell(key)
    return {
        name: views[name].clone() for name, spec in buffers.specs.items() if spec.role == "output"
    }


def bits(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Exact contents, NaN included."""
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


@dataclass(slots=True)
class Bench:
    """Buffers, a step, and a way to capture any step over them."""

    buffers: StaticBuffers
    step: Step

    def prepare(self, key: ShapeKey, variant: int) -> None:
        fill_inputs(self.buffers, key, 1 + variant % key.num_reqs, seed=variant)

    def tape(
        self,
        fn: Callable[[Views], None] | None = None,
        *,
        key: ShapeKey = KEY,
        debug: bool = False,
    ) -> TapeGraph:
        return TapeGraph(
            fn or self.step,
            self.buffers,
            key,
            prepare=lambda variant: self.prepare(key, variant),
            run_program=library.load().run_calls,
            debug=debug,
        )

    def eager(self, key: ShapeKey, num_reqs: int, seed: int) -> dict[str, Tensor]:
        """Outputs of the step called as it is."""
        fill_inputs(self.buffers, key, num_reqs, seed)
        self.buffers.poison(("scratch", "output"))
        self.step(self.buffers.cell(key))
        return outputs(self.buffers, key)

    def replay(self, graph: Graph, key: ShapeKey, num_reqs: int, seed: int) -> dict[str, Tensor]:
        fill_inputs(self.buffers, key, num_reqs, seed)
        graph.replay()
        return outputs(self.buffers, key)


def make_bench() -> Bench:
    return Bench(make_buffers(), Step())


def make_manager(
    config: CaptureConfig | None = None,
    *,
    max_num_seqs: int = 8,
    max_draft_tokens: int = 3,
    fn: Callable[[Views], None] | None = None,
) -> tuple[CaptureManager, Bench]:
    config = config or CaptureConfig()
    bench = Bench(
        make_buffers(max_num_seqs=max_num_seqs, max_draft_tokens=max_draft_tokens), Step()
    )
    manager = CaptureManager(
        ShapeTable.from_config(
            config, max_num_seqs=max_num_seqs, max_draft_tokens=max_draft_tokens, tiers=(TIER,)
        ),
        bench.buffers,
        config,
        steps={TIER: fn or bench.step},
        prepare=bench.prepare,
        run_program=library.load().run_calls,
        stream=InlineStream(),
    )
    return manager, bench


def host_view(buffers: StaticBuffers, name: str, key: ShapeKey = KEY) -> np.ndarray[Any, Any]:
    """A numpy mirror of a buffer, made before capture as the engine makes them."""
    return buffers.cell(key)[name].numpy()
