"""Configuration of an engine: what a user may set, and what it resolves to.

Owns `SpeculativeConfig`, `CacheConfig` and `EngineConfig`; `CaptureConfig` is capture's. An
explicit argument wins over the environment, the environment over the default. Checks what can be
checked before any weight is read; what depends on the checkpoint is resolved by the runner.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from capture.config import CaptureConfig
from proposers import registry
from proposers.base import DraftSampling
from proposers.info import ProposerInfo

SPECULATE_VARIABLE = "GRAPHENGINE_SPECULATE"
MAX_DRAFT_TOKENS = 64
MAX_SLOTS = (1 << 31) - 1  # tokens of a KV cache, the null block's included: slots are int32
OFF = "off"
DEFAULT_MIN_MATCH = 4  # tokens of a match that overrides a model

Numerics = Literal["invariant", "fast"]
AttentionKind = Literal["auto", "native", "triton", "flashinfer"]


@dataclass(frozen=True, slots=True, init=False)
class SpeculativeConfig:
    """Which proposer drafts, and how its drafts are verified.

    A value: `dataclasses.replace` changes fields and options and keeps the rest.

    Args:
        method: registered proposer name; `graphengine proposers` lists them.
        model: path of the draft model, for proposers that carry one; others refuse it.
        max_draft_tokens: most drafts a request may have in one step (k), 1 to 64.
        verification: `exact`: output is token-identical to no speculation. `rejection`: output is
            distributed as without (Leviathan et al. 2023), and greedy requests are identical; the
            same seed gives the same tokens only where the same drafts come with the same steps.
        draft_sampling: `greedy`: a draft is the proposer's likeliest token. The others need a
            proposer that has a distribution. `coupled`: it is the likeliest under the noise that
            will choose the target's token, which makes the two agree more often where tokens are
            sampled; needs `exact`. `probabilistic`: it is drawn from the distribution; needs
            `rejection`, as `exact` would accept it too seldom.
        adaptive: choose k from measurement; only False (a fixed k) is built.
        self_check: `error`, `warn` or `off`: what to do where a model-carrying proposer accepts
            near chance at load. Others have nothing to check, and refuse all but the default.
        override: a proposer that matches text, `ngram` or `suffix`: where its match is long, its
            drafts replace the model's for that row. For proposers that carry a model.
        override_min_match: how many tokens make a match long; no more than `override` looks up.
        options: options of the proposer itself as (name, value) pairs or a mapping; a short form
            is to pass them by name.
        named_options: these win over `options`.

    Attributes:
        options: all of the proposer's options, defaults included, as (name, value) pairs.

    Raises:
        ValueError: a field or an option has a value that is not allowed, or the proposer is unknown
            or not supported.
    """

    method: str
    model: str | None
    max_draft_tokens: int
    verification: str
    draft_sampling: DraftSampling
    adaptive: bool
    self_check: str
    override: str | None
    override_min_match: int
    options: tuple[tuple[str, object], ...]

    def __init__(
        self,
        method: str,
        *,
        model: str | Path | None = None,
        max_draft_tokens: int = 6,
        verification: str = "exact",
        draft_sampling: DraftSampling = "greedy",
        adaptive: bool = False,
        self_check: str = "error",
        override: str | None = None,
        override_min_match: int = DEFAULT_MIN_MATCH,
        options: Mapping[str, object] | Iterable[tuple[str, object]] = (),
        **named_options: object,
    ) -> None:
        info = registry.find(method).info
        resolved = info.resolve({**dict(options), **named_options})
        if isinstance(max_draft_tokens, bool) or not isinstance(max_draft_tokens, int):
            raise ValueError(
                f"max_draft_tokens={max_draft_tokens!r}: expected an integer from 1 to "
                f"{MAX_DRAFT_TOKENS}"
            )
        if not 1 <= max_draft_tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(
                f"max_draft_tokens={max_draft_tokens}: allowed are 1 to {MAX_DRAFT_TOKENS}; "
                f'to turn speculation off pass speculative="off"'
            )
        if verification not in ("exact", "rejection"):
            raise ValueError(f"verification={verification!r}: allowed are exact, rejection")
        _check_draft_sampling(draft_sampling, verification, info)
        if adaptive is not False:
            raise ValueError(
                f"adaptive={adaptive!r}: only False (a fixed draft length) is available in "
                "this version"
            )
        if self_check not in ("error", "warn", "off"):
            raise ValueError(f"self_check={self_check!r}: allowed are error, warn, off")
        _check_model(model, info)
        if self_check != "error" and info.model == "none":
            raise ValueError(
                f"self_check={self_check!r}: proposer {method!r} carries no model; leave it out"
            )
        _check_override(override, override_min_match, info)
        fields: dict[str, object] = {
            "method": method,
            "model": None if model is None else str(model),
            "max_draft_tokens": max_draft_tokens,
            "verification": verification,
            "draft_sampling": draft_sampling,
            "adaptive": adaptive,
            "self_check": self_check,
            "override": override,
            "override_min_match": override_min_match,
            "options": tuple(resolved.items()),
        }
        for name, given in fields.items():
            object.__setattr__(self, name, given)

    @classmethod
    def resolve(
        cls, given: SpeculativeConfig | str | None, **fields: Any
    ) -> SpeculativeConfig | None:
        """The configuration that an argument means; None: speculation is off.

        The one place that reads the environment.

        Args:
            given: a configuration; `off`, a proposer's name, or `name:k`; None: the text in
                `GRAPHENGINE_SPECULATE`, or off where that is unset.
            fields: of a configuration that is given as text.

        Raises:
            ValueError: anything else.
        """
        if isinstance(given, SpeculativeConfig):
            return given
        source = SPECULATE_VARIABLE if given is None else "speculative"
        text = os.environ.get(SPECULATE_VARIABLE, OFF) if given is None else given
        if not isinstance(text, str):
            raise ValueError(
                f"{source}={text!r}: expected a SpeculativeConfig, off, NAME or NAME:K"
            )
        if text.strip() in ("", OFF):
            return None
        method, colon, length = text.strip().partition(":")
        if colon and not (length.isascii() and length.isdecimal()):
            raise ValueError(f"{source}={text!r}: expected off, NAME or NAME:K with K an integer")
        if length:
            fields["max_draft_tokens"] = int(length)
        try:
            return cls(method, **fields)
        except ValueError as error:
            raise ValueError(f"{source}={text!r}: {error}") from error


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
        _integer("CacheConfig.block_size", self.block_size, 1, 256)
        if self.num_blocks is not None:
            most = min(1 << 24, MAX_SLOTS // self.block_size)
            _integer("CacheConfig.num_blocks", self.num_blocks, 2, most)
        _integer("CacheConfig.max_bytes", self.max_bytes, 1, 1 << 50)
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
        _integer("async_steps", self.async_steps, 0, 1)
        _integer("max_num_seqs", self.max_num_seqs, 1, 4096)
        _integer("seed", self.seed, 0, (1 << 63) - 1)
        if self.max_model_len is not None:
            _integer("max_model_len", self.max_model_len, 2, 1 << 24)
        if self.max_num_batched_tokens is not None:
            _integer("max_num_batched_tokens", self.max_num_batched_tokens, 1, 1 << 20)
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

    The CPU kernels widen bf16 to fp32 as they load it, on any CPU, so bf16 needs no native support
    here.
    """
    if asked == "auto":
        return torch.bfloat16 if checkpoint == torch.float16 else checkpoint
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[asked]


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name}={value!r}: expected an integer from {low} to {high}")


def _check_model(model: object, info: ProposerInfo) -> None:
    if model is None and info.model == "required":
        raise ValueError(
            f"model=None: proposer {info.name!r} needs the path of a checkpoint, such as "
            f'SpeculativeConfig({info.name!r}, model="/path/to/checkpoint"), on the command line '
            "--draft-model"
        )
    if model is None:
        return
    if not isinstance(model, str | Path) or not str(model):
        none = "" if info.model == "required" else ", or None"
        raise ValueError(f"model={model!r}: expected the path of a checkpoint{none}")
    if info.model == "none":
        raise ValueError(
            f"model={str(model)!r}: proposer {info.name!r} carries no model; leave it out"
        )


def _check_override(override: str | None, min_match: int, info: ProposerInfo) -> None:
    if override is None:
        if min_match != DEFAULT_MIN_MATCH:
            raise ValueError(
                f"override_min_match={min_match!r}: there is no override; leave it out"
            )
        return
    longest = {one.name: one.longest_match for one in registry.infos() if one.longest_match}
    if override not in longest:
        raise ValueError(f"override={override!r}: allowed are None, {', '.join(longest)}")
    _integer("override_min_match", min_match, 1, longest[override])
    if info.model == "none":
        raise ValueError(
            f"override={override!r}: proposer {info.name!r} carries no model whose drafts could be "
            "replaced; leave it out"
        )


def _check_draft_sampling(value: str, verification: str, info: ProposerInfo) -> None:
    if value == "greedy":
        return
    allowed = "greedy, coupled, probabilistic" if info.produces_probs else "greedy"
    if value not in ("coupled", "probabilistic") or not info.produces_probs:
        why = "" if info.produces_probs else ", which has no distribution"
        raise ValueError(
            f"draft_sampling={value!r}: allowed with proposer {info.name!r}{why}: {allowed}"
        )
    if value == "probabilistic" and verification != "rejection":
        raise ValueError(
            "draft_sampling='probabilistic' with verification='exact' would accept too seldom: "
            "use verification='rejection', or draft_sampling='coupled' or 'greedy'"
        )
    if value == "coupled" and verification != "exact":
        raise ValueError(
            "draft_sampling='coupled' with verification='rejection', which does not choose by "
            "that noise: use verification='exact', or draft_sampling='probabilistic' or 'greedy'"
        )
