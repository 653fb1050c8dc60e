"""Correctness: the tests of `tests/gpu`, a part a stage, each test's outcome kept as it comes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter, deque

from profiles.gpu_stages.base import Context, Stage

_OUTCOME = re.compile(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
_KEPT_LINES = 150  # of output: the failures are at its end
_FOLDER = "tests/gpu"


def run_tests(context: Context, *arguments: str, marker: str = "gpu") -> None:
    """Run pytest and keep what each test came to; RuntimeError where one failed or none passed."""
    command = [sys.executable, "-m", "pytest", "-v", "-m", marker, "-p", "no:cacheprovider"]
    command += ["--timeout", "500", "--tb", "short", *arguments]
    outcomes: dict[str, str] = {}
    last: deque[str] = deque(maxlen=_KEPT_LINES)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None, "output is piped"
        for line in process.stdout:
            last.append(line)
            found = _OUTCOME.match(line)
            if found is not None:
                outcomes[found[1]] = found[2]
                context.keep(outcomes=outcomes, counts=dict(Counter(outcomes.values())))
    counts = Counter(outcomes.values())
    if process.returncode or not counts["PASSED"]:
        raise RuntimeError(f"{dict(counts)}, pytest's status {process.returncode}\n{''.join(last)}")


def _stage(name: str, about: str, seconds: float, *arguments: str) -> Stage:
    def run(context: Context) -> None:
        run_tests(context, *arguments)

    return Stage(name=name, about=about, seconds=seconds, run=run)


STAGES = (
    _stage(
        "kernels", "layer ops and planted violations", 60,
        f"{_FOLDER}/test_ops.py", f"{_FOLDER}/test_violations.py",
    ),
    _stage(
        "attention", "values; q = 1 equals q = k + 1, both backends", 60,
        f"{_FOLDER}/test_attention.py",
    ),
    _stage("identity-tiny", "on/off, every proposer", 120, f"{_FOLDER}/test_identity.py"),
    _stage(
        "graphs", "graph kinds bit for bit, memory of capture", 120,
        f"{_FOLDER}/test_graphs.py", f"{_FOLDER}/test_memory.py",
    ),
    _stage("async", "asynchronous stepping", 60, f"{_FOLDER}/test_async.py"),
)  # fmt: skip
