"""The target's attention on a GPU: the op set's own, or FlashInfer, chosen with a reason.

Owns what the choice depends on and where it is remembered. Drafts are not asked: their chain runs
several forwards in one graph, for which only kernels that need no plan serve.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import torch

from capture.cache import cache_key, machine_facts, read_entry, write_entry
from graphengine.attention import flashinfer
from graphengine.attention.base import AttentionBackend
from graphengine.attention.choice import Choice, Contest, choose
from graphengine.attention.flashinfer_plan import VERSION
from graphengine.attention.measure import layer_seconds
from graphengine.models.factory import attention_shape
from graphengine.native_opset import NativeOpSet
from graphengine.opset import OpSet
from graphengine.probe import CONTEXTS
from graphengine.resolve import ResolvedConfig

KIND = "attention"  # of cache entries


def make_target_attention(
    resolved: ResolvedConfig, opset: OpSet
) -> tuple[AttentionBackend | None, Choice]:
    """What serves the target, None for the op set's own, and why.

    Raises:
        ValueError: what is asked for cannot serve here.
    """
    if isinstance(opset, NativeOpSet):
        return None, Choice("native", f"device {opset.device.type}")
    found = choose(resolved.attention, _Rivals(resolved, opset).contest())
    if found.name == "triton":
        return None, found
    return _Rivals(resolved, opset).flashinfer(), found


class _Rivals:
    """The op set's attention and FlashInfer, over an engine's sizes."""

    def __init__(self, resolved: ResolvedConfig, opset: OpSet) -> None:
        self._resolved = resolved
        self._opset = opset
        self._shape = attention_shape(resolved.model, resolved.sizes.block_size)
        self._cells = sorted({(key.num_reqs, key.query_len) for key in resolved.table})

    def contest(self) -> Contest:
        return Contest(
            certain="triton",
            other="flashinfer",
            check=self._check,
            measure=self._measure,
            remembered=self._remembered,
            remember=self._remember,
        )

    def flashinfer(self) -> flashinfer.FlashInferAttention:
        sizes = self._resolved.sizes
        return flashinfer.FlashInferAttention(
            self._opset.dtype,
            self._shape,
            flashinfer.FlashInferSizes(
                cells=frozenset(self._cells),
                # The probe at start asks for more requests at once than a small engine has.
                max_num_reqs=max(sizes.num_state_rows, len(CONTEXTS) + 1),
                max_num_rows=max(sizes.max_num_tokens, sizes.max_cell_tokens),
                max_blocks=sizes.max_blocks,
            ),
            device=self._opset.device,
        )

    def _check(self) -> None:
        if self._resolved.async_steps:
            raise ValueError(
                f"async_steps={self._resolved.async_steps}: FlashInfer plans by lengths that the "
                "host does not know yet"
            )
        flashinfer.check_supported(self._opset.dtype, self._shape, self._opset.device)

    def _measure(self) -> Mapping[str, float]:
        sizes, model = self._resolved.sizes, self._resolved.model
        rivals = {"triton": self._opset.attention(self._shape), "flashinfer": self.flashinfer()}
        cells = [self._cells[0], self._cells[len(self._cells) // 2], self._cells[-1]]
        return {
            name: layer_seconds(
                rival,
                self._shape,
                sorted(set(cells)),
                dtype=self._opset.dtype,
                device=self._opset.device,
                max_model_len=sizes.max_model_len,
                num_layers=model.num_layers,
            )
            for name, rival in rivals.items()
        }

    def _remembered(self) -> Choice | None:
        entry = read_entry(KIND, self._key)
        if entry is None or entry.get("name") not in ("triton", "flashinfer"):
            return None
        return Choice(str(entry["name"]), str(entry.get("reason")))

    def _remember(self, choice: Choice) -> None:
        write_entry(KIND, self._key, asdict(choice))

    @property
    def _key(self) -> str:
        device = torch.cuda.get_device_name(self._opset.device)
        return cache_key(
            machine_facts()
            | {
                "device": device,
                "cuda": torch.version.cuda,
                "opset": self._opset.fingerprint,
                "flashinfer": VERSION,
                "layers": self._resolved.model.num_layers,
                "shape": asdict(self._shape),
                "cells": self._cells,
                "dtype": self._opset.dtype,
                "max_model_len": self._resolved.sizes.max_model_len,
            }
        )
