"""Configuration of an engine: what a user may set, and what it resolves to.

Owns `CacheConfig` and `EngineConfig`; `CaptureConfig` is capture's, and speculation has a module of
its own. An explicit argument wins over the environment, the environment over the default. Checks
what can be checked before any weight is read; what depends on the checkpoint is `resolve`'s.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from capture.config import CaptureConfig
from graphengine.checks import check_integer
from graphengine.speculative_config import OFF, SpeculativeConfig

MAX_SLOTS = (1 << 31) - 1  # tokens of a KV cache, the null block's included: slots are int32

Numerics = Literal["invariant", "fast"]
AttentionKind = Literal["auto", "native", "triton", "flashinfer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """KV cache.

    Args:
        block_size: tokens a block.
        num_blocks: physical blocks, the null block included; None: as many as `max_bytes` holds,
            but no more than `max_num_seqs` full contexts need. At most 2**31 - 1 tokens in all.
        max_bytes: size of the cache in bytes where `num_blocks` is None.
        enable_prefix_caching: reuse the KV of prompts seen before.
        enable_chunked_prefill: split prompts over steps. Without it all of a prompt that is not
            cached runs in the step that admits the request, as does a recompute after preemption;
            it waits for that, and drafts of others yield to it. `max_num_batched_tokens` must then
            be at least `max_model_len`, as its default is. Inside a step prompts run in forwards of
            up to 256 rows either way.
    """

    block_size: int = 16
    num_blocks: int | None = None
    max_bytes: int = 1 << 30
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True

    def __post_init__(self) -> None:
        check_integer("CacheConfig.block_size", self.block_size, 1, 256)
        if self.num_blocks is not None:
            most = min(1 << 24, MAX_SLOTS // self.block_size)
            check_integer("CacheConfig.num_blocks", self.num_blocks, 2, most)
        check_integer("CacheConfig.max_bytes", self.max_bytes, 1, 1 << 50)
        for name in ("enable_prefix_caching", "enable_chunked_prefill"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(
                    f"CacheConfig.{name}={getattr(self, name)!r}: expected True or False"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Everything an engine is built from; see `LLM` for the meaning of each field.

    `speculative` is a SpeculativeConfig, `"off"`, or None, which leaves the choice to the
    environment when an engine starts; other texts are accepted and stored as what they mean.
    """

    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int | None = None
    seed: int = 0
    numerics: Numerics = "invariant"
    async_steps: int = 0
    attention: AttentionKind = "auto"
    speculative: SpeculativeConfig | str | None = None
    logits_processors: bool = False
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "bfloat16", "float32"):
            raise ValueError(f"dtype={self.dtype!r}: allowed are auto, bfloat16, float32")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device={self.device!r}: allowed are auto, cpu, cuda")
        if self.attention not in get_args(AttentionKind):
            raise ValueError(
                f"attention={self.attention!r}: allowed are {', '.join(get_args(AttentionKind))}"
            )
        if self.numerics not in ("invariant", "fast"):
            raise ValueError(f"numerics={self.numerics!r}: allowed are invariant, fast")
        if not isinstance(self.logits_processors, bool):
            raise ValueError(
                f"logits_processors={self.logits_processors!r}: expected True or False; the "
                "processors themselves are given to SamplingParams"
            )
        check_integer("async_steps", self.async_steps, 0, 1)
        check_integer("max_num_seqs", self.max_num_seqs, 1, 4096)
        check_integer("seed", self.seed, 0, (1 << 63) - 1)
        if self.max_model_len is not None:
            check_integer("max_model_len", self.max_model_len, 2, 1 << 24)
        if self.max_num_batched_tokens is not None:
            check_integer("max_num_batched_tokens", self.max_num_batched_tokens, 1, 1 << 20)
        for name, expected in (("capture", CaptureConfig), ("cache", CacheConfig)):
            if not isinstance(getattr(self, name), expected):
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: expected a {expected.__name__} or None"
                )
        if self.speculative is not None:
            # "off" must stay apart from None, also when the config is copied with changes.
            stored = SpeculativeConfig.resolve(self.speculative) or OFF
            object.__setattr__(self, "speculative", stored)


def resolve_device(asked: str) -> torch.device:
    """Where weights, KV and steps live; `auto` is a CUDA device where there is one.

    Raises:
        ValueError: `cuda` where torch has no such device.
    """
    has_cuda = torch.cuda.is_available()
    if asked == "cuda" and not has_cuda:
        raise ValueError(
            "device='cuda': torch finds no CUDA device here; use device='cpu', or a build of torch "
            "for this machine's driver"
        )
    if asked == "auto":
        asked = "cuda" if has_cuda else "cpu"
    return torch.device(asked)


_COMPILE_MODES = {
    "cpu": ("auto", "native", "inductor", "off"),
    "cuda": ("auto", "triton", "inductor", "off"),
}


def is_native(capture: CaptureConfig, device: torch.device) -> bool:
    """Whether steps are made of C++ kernels, with or without torch's pieces among them."""
    return device.type == "cpu" and capture.compile != "triton"


def check_compile_mode(capture: CaptureConfig, device: torch.device) -> None:
    """Raises ValueError for a mode that this device does not have, or where triton is missing."""
    mode, allowed = capture.compile, _COMPILE_MODES.get(device.type, ())
    interpreted = mode == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if mode not in allowed and not interpreted:
        raise ValueError(
            f"CaptureConfig.compile={mode!r}: allowed on device {device.type} are "
            f"{', '.join(allowed)}"
        )
    needs_triton = device.type == "cuda" or interpreted
    if needs_triton and importlib.util.find_spec("triton") is None:
        raise ValueError(
            f"CaptureConfig.compile={mode!r}: triton is not installed; pip install 'triton>=3.6'"
        )


def resolve_dtype(asked: str, checkpoint: torch.dtype) -> torch.dtype:
    """Dtype of matrices and KV: the checkpoint's for `auto`; float16 is kept as bfloat16 on CPU.

    bf16 needs no native support: where the CPU has none, the kernels widen it as they load it.
    """
    if asked == "auto":
        return torch.bfloat16 if checkpoint == torch.float16 else checkpoint
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[asked]
