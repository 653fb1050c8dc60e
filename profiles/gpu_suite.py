"""Everything that a GPU has to show, in stages: correctness first, then times; cut off at any time.

Each stage is a process of its own, since a fault of the device ends all work of its process. It has
its JSON file in the folder from its first result on; a second call goes on where the first stopped:

    python -m profiles.gpu_suite --out FOLDER [--only STAGE,...] [--seconds 540] [--model MODEL]

Ends with `summary.md`: the targets, what was found, met or missed. `--list` names the stages. A
bare machine needs torch and triton for its driver, g++, pytest with hypothesis and pytest-timeout,
this checkout, and the packages of pyproject.toml (GPU images lack gguf as a rule); the stages of
FlashInfer fail by name where it is missing. Without `--model` (SmolLM2's file, say) a cost-inflated
tiny target stands in, and the results say so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from graphengine.bench.results_file import write_json
from profiles.gpu_stages import ORDER
from profiles.gpu_stages.base import Context, Stage
from profiles.gpu_stages.targets import report

DONE = ("ok", "failed")
LEAST_SECONDS = 5.0  # under which nothing is started
TAIL = 6000  # characters of a failing stage's output that are kept


def run_all(
    stages: Sequence[Stage],
    folder: Path,
    seconds: float,
    start: Callable[[Stage, float], tuple[int | None, str]],
    *,
    again: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Run what is not done and fits, in order, and return the names of what ran.

    Args:
        folder: of the results.
        seconds: for all of it.
        start: runs a stage within so many seconds: its exit status, None where it took longer, and
            what it printed last.
        again: whether what is done runs once more.
    """
    end, ran = clock() + seconds, []
    for stage in stages:
        file = folder / f"{stage.name}.json"
        found = read(file)
        if found.get("status") in DONE and not again:
            print(f"{stage.name}: {found['status']} already", flush=True)
            continue
        left = end - clock()
        if left < max(stage.seconds, LEAST_SECONDS):
            print(f"{stage.name}: wants {stage.seconds:.0f} s, {left:.0f} are left", flush=True)
            break
        begun = clock()
        status, output = start(stage, left)
        result = {
            "stage": stage.name,
            "status": {0: "ok", None: "out of time"}.get(status, "failed"),
            "seconds": clock() - begun,
            **({} if status == 0 else {"output": output[-TAIL:]}),
            "result": read(file).get("result", {}),
        }
        write_json(file, result)
        print(f"{stage.name}: {result['status']}, {result['seconds']:.0f} s", flush=True)
        ran.append(stage.name)
    return ran


def read(file: Path) -> dict[str, Any]:
    """What a file holds; nothing where there is none."""
    if not file.is_file():
        return {}
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def start_process(stage: Stage, seconds: float, arguments: Sequence[str]) -> tuple[int | None, str]:
    """A stage in a process of its own, whose output goes to a file until it is known."""
    command = [sys.executable, "-m", "profiles.gpu_suite", *arguments, "--child", stage.name]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        child = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            status: int | None = child.wait(seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            status = None
        output.seek(0)
        return status, output.read()


def run_stage(stage: Stage, args: argparse.Namespace) -> None:
    """A stage in this process; what it saves goes on from an earlier, broken run."""
    file = args.out / f"{stage.name}.json"
    result = read(file).get("result", {})

    def save(found: Mapping[str, Any]) -> None:
        write_json(file, {"stage": stage.name, "status": "running", "result": found})

    context = Context(
        folder=args.out, scratch=args.scratch, model=args.model, device=args.device,
        result=result, save=save,
    )  # fmt: skip
    stage.run(context)
    context.keep()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [stage.name for stage in ORDER]
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--only", help=f"of {','.join(names)}")
    parser.add_argument("--seconds", type=float, default=540, help="for this call")
    parser.add_argument("--model", help="SmolLM2's file or folder")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--scratch", type=Path, help="where inflated models are kept: 17 GB")
    parser.add_argument("--again", action="store_true", help="run what is done once more")
    parser.add_argument("--list", action="store_true", help="name the stages and end")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    unknown = sorted(set(args.only.split(",") if args.only else ()) - set(names))
    if unknown:
        parser.error(f"--only: no stage {', '.join(unknown)}; there are {', '.join(names)}")
    args.scratch = args.scratch or Path(tempfile.gettempdir()) / "graphengine-inflated"
    return args


def main() -> int:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.list:
        print("\n".join(f"{stage.name}: {stage.about}" for stage in ORDER))
        return 0
    if args.child is not None:
        run_stage(next(stage for stage in ORDER if stage.name == args.child), args)
        return 0
    chosen = args.only.split(",") if args.only else [stage.name for stage in ORDER]
    arguments = sys.argv[1:]
    run_all(
        [stage for stage in ORDER if stage.name in chosen],
        args.out,
        args.seconds,
        lambda stage, left: start_process(stage, left, arguments),
        again=args.again,
    )
    results = {stage.name: read(args.out / f"{stage.name}.json") for stage in ORDER}
    text = report(results)
    (args.out / "summary.md").write_text(text, encoding="utf-8")
    print(text)
    return 1 if any(one.get("status") == "failed" for one in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
