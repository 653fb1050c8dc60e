"""Times the CPU kernels against torch: the linears of one SmolLM2-135M step, and attention.

Every repetition runs all contenders in turn, so that a disturbed moment hits them alike; the table
gives medians, and ratios as medians of the paired ratios. Run with nothing else running:

    python profiles/kernels.py --threads 2
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from capture.ops import WORDS_PER_CALL
from graphengine.attention.cpu import SCRATCH_FLOATS
from graphengine.kernels.library import load
from graphengine.kernels.ops import native_op

LAYERS = 30
HIDDEN, INTERMEDIATE, VOCAB = 576, 1536, 49152
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 9, 3, 64, 16
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
# [out features, in features] of one layer, then the head
LAYER_SHAPES = ((QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
Contender = Callable[[], object]


def paired(contenders: dict[str, Contender], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each contender, taken in turn for about `seconds` (at least 5 rounds)."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run()
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or len(next(iter(times.values()))) < 5:
        for name, run in contenders.items():
            begin = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - begin) * 1e3)
    return times


def ratio(a: list[float], b: list[float]) -> float:
    return median(x / y for x, y in zip(a, b, strict=True))


def call(name: str, *arguments: Tensor | int | None) -> tuple[str, list[int]]:
    words = [a.data_ptr() if isinstance(a, Tensor) else a or 0 for a in arguments]
    return name, words


def run_each(calls: list[tuple[str, list[int]]]) -> Contender:
    """The calls one by one from Python."""
    functions = [(getattr(load(), name), words) for name, words in calls]

    def run() -> None:
        for function, words in functions:
            function(*words)

    return run


def run_program(calls: list[tuple[str, list[int]]]) -> Contender:
    """The same calls as one recorded program."""
    words = [word for name, args in calls for word in native_op(name).encode(tuple(args))]
    program = torch.tensor(words, dtype=torch.int64)
    return lambda: load().run_calls(program.data_ptr(), len(words) // WORDS_PER_CALL)


def run_torch(x: dict[int, Tensor], weights: list[Tensor]) -> None:
    for w in weights:
        F.linear(x[w.shape[1]], w)


def linears(rows: list[int], seconds: float) -> None:
    """All 121 linears of a step: bf16 kernels, called and recorded, against F.linear."""
    shapes = [*LAYER_SHAPES * LAYERS, (VOCAB, HIDDEN)]
    weights = [torch.randn(shape).bfloat16() for shape in shapes]
    print(
        "\n| M | kernels, ms | recorded, ms | F.linear bf16, ms | kernels / F.linear | vs M = 1 |"
    )
    print("|---|---|---|---|---|---|")
    one: float | None = None
    for m in rows:
        x = {k: torch.randn(m, k) for _, k in shapes}
        out = {n: torch.empty(m, n) for n, _ in shapes}
        half = {k: value.bfloat16() for k, value in x.items()}
        calls = [
            call("linear_bf16", out[w.shape[0]], x[w.shape[1]], w, None, m, *w.shape, 0)
            for w in weights
        ]
        times = paired(
            {
                "each": run_each(calls),
                "program": run_program(calls),
                "torch": partial(run_torch, half, weights),
            },
            seconds,
        )
        each, program, torch_ms = (median(values) for values in times.values())
        one = one or program
        print(
            f"| {m} | {each:.2f} | {program:.2f} | {torch_ms:.2f} "
            f"| {ratio(times['program'], times['torch']):.2f} | {program / one:.2f} |",
            flush=True,
        )


def attention(contexts: list[int], seconds: float) -> None:
    """Attention of all layers (bf16 cache) by context, for 1 and 7 rows and for a prefill."""
    print("\n| context | rows | kernel, ms | vs first line |")
    print("|---|---|---|---|")
    first: float | None = None
    for context, rows in [(c, q) for c in contexts for q in (1, 7)] + [(512, 512)]:
        blocks = -(-context // BLOCK)
        caches = [
            torch.randn(blocks + 1, 2, BLOCK, KV_HEADS, HEAD_DIM).bfloat16() for _ in range(LAYERS)
        ]
        table = (torch.randperm(blocks) + 1).int().view(1, -1)
        qkv, out = torch.randn(rows, QKV), torch.empty(rows, HEADS * HEAD_DIM)
        starts = torch.tensor([0, rows], dtype=torch.int32)
        positions = torch.arange(context - rows, context, dtype=torch.int32)
        scratch = torch.empty(SCRATCH_FLOATS)
        calls = [
            call(
                "paged_attention_bf16", out, qkv, cache, table, starts, positions, 1, blocks,
                HEADS, KV_HEADS, HEAD_DIM, BLOCK, 0, scratch, SCRATCH_FLOATS,
            )
            for cache in caches
        ]  # fmt: skip
        took = median(paired({"kernel": run_program(calls)}, seconds)["kernel"])
        first = first or took
        print(f"| {context} | {rows} | {took:.2f} | {took / first:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 4, 7, 8, 16, 28, 56, 128])
    parser.add_argument("--contexts", type=int, nargs="*", default=[100, 500, 2000])
    parser.add_argument("--seconds", type=float, default=2.0, help="for each line of the tables")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{options.threads} threads, {load().vector_lanes()} lanes, SmolLM2-135M shapes")
    linears(options.rows, options.seconds)
    attention(options.contexts, options.seconds)


if __name__ == "__main__":
    main()
