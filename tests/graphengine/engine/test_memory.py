"""The memory plan: it is what is allocated, and is held to the machine before weights (57)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from graphengine import memory, startup
from graphengine.engine import Engine
from graphengine.memory import available_bytes, group_limits, plan_memory
from graphengine.models.loader import open_model
from graphengine.resolve import resolve
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.setups import Setup

SETUP = Setup(k=3, num_blocks=40, max_num_seqs=5, max_model_len=63, block_size=4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_plan_is_what_is_allocated(name: str, dtype: str, checkpoints: Checkpoints) -> None:
    """A part that the plan leaves out, or counts in another dtype."""
    engine = replace(SETUP, dtype=dtype).start(checkpoints.get(name))
    planned, runner, state = plan_memory(engine.resolved), engine.runner, engine.state
    decoder = runner.decoder
    assert planned.weights == decoder.weights.num_bytes
    assert planned.buffers == runner.buffers.num_bytes
    assert planned.kv == sum(cache.nbytes for cache in decoder.kv_caches)
    device = state.device
    everything = [*vars(state).values(), *vars(device).values(), *vars(device.sampler).values()]
    rows = [part for part in everything if isinstance(part, np.ndarray | torch.Tensor)]
    prompts = runner._prompt_logprobs._logits
    scratch = [decoder.attention.scratch, decoder.rope.cos, decoder.rope.sin, prompts, *rows]
    assert planned.scratch == sum(part.nbytes for part in scratch)
    engine.close()


def test_more_than_the_machine_has_is_refused_before_weights(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is ended by the system while it fills what it was granted."""
    planned = plan_memory(resolve(open_model(checkpoints.get()).config, SETUP.config()))
    phases: list[str] = []
    monkeypatch.setattr(startup, "available_bytes", lambda device: planned.total - 1)
    message = (
        f"{planned.total} bytes cannot be allocated, the machine has {planned.total - 1}: "
        f"weights {planned.weights}, static buffers {planned.buffers}, scratch {planned.scratch}, "
        f"KV cache {planned.kv}; lower"
    )
    with pytest.raises(ValueError, match=message):
        Engine(checkpoints.get(), SETUP.config(), progress=lambda phase, *_: phases.append(phase))
    assert not phases
    monkeypatch.setattr(startup, "available_bytes", lambda device: planned.total)
    SETUP.start(checkpoints.get()).close()


GROUPS = {
    "version 2": ("0::/a/b\n", "a/memory.max"),
    "version 2 of a container": ("0::/elsewhere\n", "memory.max"),
    "version 1": ("3:cpu,cpuacct:/a/b\n4:memory:/a/b\n0::/\n", "memory/a/b/memory.limit_in_bytes"),
}


@pytest.mark.parametrize("kind", GROUPS)
def test_a_control_groups_limit_counts(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that is ended by its limit because the machine around it has more."""
    text, name = GROUPS[kind]
    groups = tmp_path / "groups"
    groups.write_text(text)
    monkeypatch.setattr(memory, "group_limits", lambda *_: group_limits(groups, tmp_path))
    machine = available_bytes(torch.device("cpu"))
    limit = tmp_path / name
    limit.parent.mkdir(parents=True, exist_ok=True)
    for value, expected in (("max", machine), (f"{1 << 62}", machine), ("4096", 4096)):
        limit.write_text(value + "\n")
        assert available_bytes(torch.device("cpu")) == expected
    groups.unlink()
    assert available_bytes(torch.device("cpu")) == machine > 1 << 28
