"""The machine, and what a first start on it takes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from capture.config import CaptureConfig
from graphengine import LLM, SamplingParams
from graphengine.bench.environment import command_line, describe
from graphengine.versions import version
from profiles.gpu_stages.base import TINY, Context, Stage, copy_bandwidth

_QUERY = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"
_PACKAGES = ("triton", "flashinfer-python", "apache-tvm-ffi", "pytest")


def environment(context: Context) -> None:
    """Device, versions and clocks; the copy that everything is held to."""
    context.keep(**describe(command_line("python", "-m", "profiles.gpu_suite")))
    context.keep(packages={name: version(name) for name in _PACKAGES})
    context.keep(tools={name: shutil.which(name) is not None for name in ("g++", "nvcc", "ninja")})
    device = context.torch_device
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        context.keep(
            device={
                "name": found.name,
                "capability": [found.major, found.minor],
                "multiprocessors": found.multi_processor_count,
                "bytes": found.total_memory,
            }
        )
        command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv"]
        if shutil.which("nvidia-smi"):
            asked = subprocess.run(command, capture_output=True, text=True, check=False)
            context.keep(nvidia_smi=asked.stdout)
    context.keep(copy_bytes_per_second=copy_bandwidth(device))


def load(context: Context) -> None:
    """Seconds of an import, of a first start with every Triton kernel to build, and of a second."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import graphengine"], check=True)
    context.keep(import_seconds=time.perf_counter() - start)
    folder = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
    context.keep(triton_cache_was_empty=not (folder.is_dir() and any(folder.iterdir())))
    for name in ("first", "second"):
        start = time.perf_counter()
        capture = CaptureConfig(num_reqs=(1, 4), draft_lengths=(0, 3))
        with LLM(
            TINY / "target", device=context.device, max_num_seqs=4, max_model_len=256,
            speculative="ngram:3", capture=capture, dtype="bfloat16",
        ) as llm:  # fmt: skip
            ready = time.perf_counter()
            text = llm.generate(["def main("], SamplingParams(max_tokens=16))[0].outputs[0].text
            phases = dict(llm.engine.start_times.seconds)
            report = llm.capture_report().splitlines()
        context.row(
            name,
            {
                "seconds": ready - start,
                "phases": phases,
                "text": text,
                "capture_report": [report[0], report[-1]],
            },
        )


STAGES = (
    Stage(name="environment", about="device, versions, clocks, copy", seconds=20, run=environment),
    Stage(name="load", about="import, kernels built, first start", seconds=60, run=load),
)
