"""A few steps of one engine between cudaProfilerStart and Stop, for a profiler around the process.

Owns the marks: what comes before them (loading, capture, warm-up) is in no report. Measures
nothing itself. Run by nsys.sh and ncu.sh, or under any profiler that minds the CUDA profiler API.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch

from graphengine import tracing
from graphengine.config import resolve_device
from profiles.step_engine import add_arguments, check_running, fill, open_engine

WARM_UP = 5


def marked(run: Callable[[], None]) -> None:
    """Run between the marks, phases named, all work of the device inside."""
    torch.cuda.synchronize()
    with torch.cuda.profiler.profile(), tracing.enable():
        run()
        torch.cuda.synchronize()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--mode", default="cuda", choices=("eager", "compiled", "cuda"))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--ceiling", action="store_true", help="copy memory behind the steps, for ncu_table.py"
    )
    args = parser.parse_args()
    if min(args.batch, args.steps) < 1 or args.k < 0:
        parser.error("--batch and --steps must be at least 1, --k at least 0")
    if resolve_device(args.device).type != "cuda":
        parser.error(
            f"--device {args.device} is no CUDA device here: on a CPU use profiles.graph_vs_eager"
        )
    return args


def main() -> int:
    args = parse()
    engine = open_engine(args, args.mode, [args.batch], [args.k], WARM_UP + args.steps)
    fill(engine, args.batch, args.k, args.context, WARM_UP)
    copy = None
    if args.ceiling:
        # Here, because Triton may be missing where only Nsight Systems is used.
        from profiles.copy_ceiling import make_copy

        copy = make_copy(engine.resolved.device)
        copy()

    def run() -> None:
        for _ in range(args.steps):
            engine.step()
        if copy is not None:
            for _ in range(5):
                copy()

    marked(run)
    check_running(engine, args.batch)
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
