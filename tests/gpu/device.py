"""Where a test of this folder runs: on the GPU and, smaller, on the CPU, which tests the test.

There single kernels are interpreted, and engines run the CPU's own. Setups are those of the engine
tests with a device, so the harness, the workloads and the scripts of the CPU's tests serve here as
they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from graphengine.config import EngineConfig
from tests.graphengine.engine.setups import Setup

WEIGHTS = Path(__file__).parents[1] / "weights" / "tiny"
TARGET = WEIGHTS / "target"
gpu = pytest.mark.gpu
# Storage that the interpreter is right about, and what a GPU is used with.
PLACES = [
    pytest.param("cpu", torch.float32, id="interpreted-fp32"),
    pytest.param("cpu", torch.float16, id="interpreted-fp16"),
    pytest.param("cuda", torch.float32, id="cuda-fp32", marks=gpu),
    pytest.param("cuda", torch.bfloat16, id="cuda-bf16", marks=gpu),
]
ENGINES = [pytest.param("cpu"), pytest.param("cuda", marks=gpu)]
# Distance of a result from its twin's, both as vectors, over the twin's length.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSetup(Setup):
    """A setup on a device. `launch` is the kind of graph, `graph` that of the CPU."""

    device: str = "cuda"
    attention: str = "auto"
    launch: str = "auto"
    async_steps: int = 0

    def config(self, method: str = "ngram", **options: Any) -> EngineConfig:
        config = Setup.config(self, method, **options)
        capture = config.capture
        if self.device == "cuda":
            capture = replace(capture, graph=self.launch, compile="auto")
        return replace(
            config,
            device=self.device,
            attention=self.attention if self.device == "cuda" else "auto",
            async_steps=self.async_steps,
            capture=capture,
        )


def cases(on_cpu: Sequence[Any], on_cuda: Sequence[Any]) -> list[Any]:
    """Parameters (device, value), fewer on the CPU."""
    return [
        *(pytest.param("cpu", one) for one in on_cpu),
        *(pytest.param("cuda", one, marks=gpu) for one in on_cuda),
    ]


def distance(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Length of the difference over that of what is expected; both may lie anywhere."""
    wanted = expected.double().cpu()
    return float((out.double().cpu() - wanted).norm() / wanted.norm())


def draft_options(name: str) -> dict[str, Any]:
    """What asks for a proposer by the name of its weights in the tiny family."""
    if name in ("ngram", "suffix"):
        return {"method": name}
    method = "eagle" if name.startswith("eagle") else name
    return {"method": method, "model": str(WEIGHTS / name)}
