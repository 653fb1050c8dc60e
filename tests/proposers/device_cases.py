"""What starts each proposer that carries a model: its checkpoint, its target and its stand-in.

The contract suite runs over the registry and looks here for the rest. A new proposer is one entry.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from proposers.mock import Records
from tests.draft_heads import Head, make_eagle3
from tests.graphengine.engine.checkpoints import Checkpoints, Weights, edit_weights
from tests.mtp_checkpoints import SINGLE_FILE, add_layers, make_layers


def _llama(checkpoints: Checkpoints) -> Path:
    return checkpoints.get()


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceCase:
    """One proposer as the tests start it.

    Attributes:
        options: of its `SpeculativeConfig`, from what the target is known to answer.
        target: the checkpoint that it drafts for.
        mock: the scripted proposer that has its contract; "": it is one.
    """

    options: Callable[[Checkpoints, Records], dict[str, Any]]
    target: Callable[[Checkpoints], Path] = _llama
    mock: str = ""


def _draft_model(checkpoints: Checkpoints, records: Records) -> dict[str, Any]:
    """The target itself with a head that is a little off: some of its drafts are right."""
    source = checkpoints.get()
    directory = source.with_name("llama-nearly")
    if not directory.exists():
        shutil.copytree(source, directory)
        edit_weights(directory, _blur_head)
    return {"model": str(directory)}


def _blur_head(weights: Weights) -> None:
    head, generator = weights["lm_head.weight"], torch.Generator().manual_seed(1)
    head += 0.02 * torch.randn(head.shape, generator=generator)


def _eagle(checkpoints: Checkpoints, records: Records) -> dict[str, Any]:
    """A random head over three states: hardly a draft is right, and all of them are compared."""
    directory = checkpoints.get().with_name("eagle-head")
    if not directory.exists():
        make_eagle3(directory, Head())
    return {"model": str(directory)}


def _mtp(checkpoints: Checkpoints, records: Records) -> dict[str, Any]:
    """Two random layers beside the target."""
    target = checkpoints.get()
    directory = target.with_name("mtp-layers")
    if not directory.exists():
        layers = make_layers(load_file(target / SINGLE_FILE), 2)
        add_layers(target, "deepseek", layers, directory)
    return {"model": str(directory)}


def _recorded(checkpoints: Checkpoints, records: Records) -> dict[str, Any]:
    """One draft right, the others wrong."""
    return {"records": records, "num_accepted": 1}


CASES = {
    "draft_model": DeviceCase(options=_draft_model, mock="mock-draft-model"),
    "eagle": DeviceCase(options=_eagle, mock="mock-eagle"),
    "mtp": DeviceCase(options=_mtp, mock="mock-mtp"),
    "mock-draft-model": DeviceCase(options=_recorded),
    "mock-eagle": DeviceCase(options=_recorded),
    "mock-mtp": DeviceCase(options=lambda *given: {**_recorded(*given), "num_layers": 2}),
}
