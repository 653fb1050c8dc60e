"""Options that commands share, and the engine that they describe.

Owns the flags and their panels. A command takes an `EngineOptions`, and may take flags of its own
in the same form; the `command` decorator spreads their fields over the command line. Values are
checked by the library, whose messages the user sees.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast, get_type_hints

import typer

from capture.config import CaptureConfig, CompileMode, GraphKind
from graphengine.cli.console import start_progress
from graphengine.config import AttentionKind, CacheConfig, EngineConfig, Numerics
from graphengine.engine import Engine
from graphengine.models.loader import open_model
from graphengine.models.locate import DEMO_MODEL
from graphengine.models.sampling_defaults import SamplingDefaults
from graphengine.sampling.params import SamplingParams
from graphengine.speculative_config import OFF, SpeculativeConfig, adaptive_of

_SPECULATION, _ENGINE, _CAPTURE = "Speculation", "Engine", "Capture"
_CACHE, _SAMPLING = "KV cache", "Sampling"
# What a flag is called in SpeculativeConfig.
_SPECULATIVE_FIELDS = {
    "draft_model": "model",
    "override": "override",
    "override_min_match": "override_min_match",
    "draft_sampling": "draft_sampling",
    "verification": "verification",
    "self_check": "self_check",
    "adaptive": "adaptive",
}

Model = Annotated[
    str,
    typer.Argument(
        help=f"A Hugging Face directory, a .gguf file, or {DEMO_MODEL}.", show_default=True
    ),
]


def _option(
    panel: str, flag: str, help: str, metavar: str | None = None, *, alias: str | None = None
) -> Any:
    flags = (flag,) if alias is None else (flag, alias)
    return typer.Option(*flags, help=help, metavar=metavar, rich_help_panel=panel)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """Flags of an engine; the field defaults are those of the library."""

    speculate: Annotated[
        str | None,
        _option(
            _SPECULATION,
            "--speculate",
            "off, NAME, or NAME:K for at most K drafts a step (`graphengine proposers`). "
            "Default: what GRAPHENGINE_SPECULATE says, else off.",
            "METHOD[:K]",
            alias="--proposer",
        ),
    ] = None
    draft_model: Annotated[
        str | None,
        _option(
            _SPECULATION,
            "--draft-model",
            "Checkpoint of a proposer with a model: a path, or smollm2-135m-eagle3, which comes "
            "with the package.",
            "PATH",
        ),
    ] = None
    override: Annotated[
        str | None,
        _option(
            _SPECULATION,
            "--override",
            "ngram or suffix: where it finds a long match, its drafts replace the model's.",
            "NAME",
        ),
    ] = None
    override_min_match: Annotated[
        int | None,
        _option(_SPECULATION, "--override-min-match", "Tokens from which on a match is long.", "N"),
    ] = None
    draft_sampling: Annotated[
        str | None,
        _option(
            _SPECULATION,
            "--draft-sampling",
            "greedy, coupled or probabilistic: how drafts of sampled requests are chosen.",
        ),
    ] = None
    verification: Annotated[
        str | None,
        _option(
            _SPECULATION,
            "--verification",
            "exact: the tokens of no speculation; rejection: tokens of the same distribution.",
        ),
    ] = None
    self_check: Annotated[
        str | None,
        _option(
            _SPECULATION,
            "--self-check",
            "error, warn or off: what to do where a draft model accepts near chance at start.",
        ),
    ] = None
    adaptive: Annotated[
        str | None,
        _option(
            _SPECULATION,
            "--adaptive",
            "on: the draft length that pays best, as measured; off: always K; threshold: 2 while "
            "few drafts are accepted; 1:6,4:3,9:0: by the number of requests.",
        ),
    ] = None
    dtype: Annotated[str, _option(_ENGINE, "--dtype", "auto, bfloat16 or float32.")] = "auto"
    device: Annotated[str, _option(_ENGINE, "--device", "auto, cpu or cuda.")] = "auto"
    attention: Annotated[
        str, _option(_ENGINE, "--attention", "auto, native (CPU), triton or flashinfer.")
    ] = "auto"
    async_steps: Annotated[
        int,
        _option(_ENGINE, "--async-steps", "1: launch a step before the one before was read.", "N"),
    ] = 0
    max_model_len: Annotated[
        int | None,
        _option(_ENGINE, "--max-model-len", "Context limit, prompt and output together.", "TOKENS"),
    ] = None
    max_num_seqs: Annotated[
        int, _option(_ENGINE, "--max-num-seqs", "Requests that run at once.", "N")
    ] = 16
    max_num_batched_tokens: Annotated[
        int | None, _option(_ENGINE, "--max-num-batched-tokens", "Rows a step.", "N")
    ] = None
    numerics: Annotated[
        str,
        _option(
            _ENGINE,
            "--numerics",
            "invariant: a row's bits depend on nothing that shares its step; fast: not checked.",
        ),
    ] = "invariant"
    capture_config: Annotated[
        Path | None,
        _option(_CAPTURE, "--capture-config", "TOML file of a capture configuration.", "FILE.toml"),
    ] = None
    graph: Annotated[
        str | None,
        _option(_CAPTURE, "--graph", "auto, tape, compiled or eager; wins over the file."),
    ] = None
    compile: Annotated[
        str | None,
        _option(_CAPTURE, "--compile", "auto, native, inductor or off; wins over the file."),
    ] = None
    lazy: Annotated[
        bool, _option(_CAPTURE, "--lazy-capture", "Capture a cell on its first use.")
    ] = False
    block_size: Annotated[int, _option(_CACHE, "--block-size", "Tokens a block.", "N")] = 16
    num_blocks: Annotated[
        int | None,
        _option(_CACHE, "--num-blocks", "Blocks, the null block included.", "N"),
    ] = None
    kv_bytes: Annotated[
        int, _option(_CACHE, "--kv-bytes", "Size of the cache without --num-blocks.", "BYTES")
    ] = 1 << 30
    no_prefix_caching: Annotated[
        bool, _option(_CACHE, "--no-prefix-caching", "Compute every prompt anew.")
    ] = False
    no_chunked_prefill: Annotated[
        bool, _option(_CACHE, "--no-chunked-prefill", "Run every prompt in one step.")
    ] = False

    def config(self) -> EngineConfig:
        """The configuration that the flags mean.

        Raises:
            ValueError: a flag has a value that is not allowed.
        """
        return EngineConfig(
            dtype=self.dtype,
            device=self.device,
            attention=cast(AttentionKind, self.attention),
            async_steps=self.async_steps,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            numerics=cast(Numerics, self.numerics),
            speculative=self._speculative(),
            capture=self._capture(),
            cache=CacheConfig(
                block_size=self.block_size,
                num_blocks=self.num_blocks,
                max_bytes=self.kv_bytes,
                enable_prefix_caching=not self.no_prefix_caching,
                enable_chunked_prefill=not self.no_chunked_prefill,
            ),
        )

    def paired_config(self) -> EngineConfig:
        """The configuration for timing speculation off and on in one engine.

        That of `speculating_config`, without the prefix cache, which would spare whichever side
        comes second its prefill.

        Raises:
            ValueError: as there.
        """
        config = self.speculating_config()
        cache = dataclasses.replace(config.cache, enable_prefix_caching=False)
        return dataclasses.replace(config, cache=cache)

    def speculating_config(self) -> EngineConfig:
        """The configuration for comparing speculation off and on in one engine.

        Speculation is on, n-gram where no flag and no environment names another: `off` in the
        environment is a default for engines, not a wish to compare off with off.

        Raises:
            ValueError: a flag has a value that is not allowed; `--speculate off` is one here.
        """
        default = self.speculate is None and SpeculativeConfig.resolve(None) is None
        config = (dataclasses.replace(self, speculate="ngram") if default else self).config()
        if config.speculative == OFF:
            raise ValueError(
                f"--speculate {self.speculate}: this command compares speculation off with on; "
                "name what is to be on (ngram, ngram:K), or leave the flag out"
            )
        speculative = SpeculativeConfig.resolve(config.speculative)
        return dataclasses.replace(config, speculative=speculative)

    def _speculative(self) -> SpeculativeConfig | str | None:
        given = {
            name: getattr(self, name)
            for name in _SPECULATIVE_FIELDS
            if getattr(self, name) is not None
        }
        if not given:
            return self.speculate
        fields = {_SPECULATIVE_FIELDS[name]: value for name, value in given.items()}
        if self.adaptive is not None:
            fields["adaptive"] = adaptive_of(self.adaptive)
        config = SpeculativeConfig.resolve(self.speculate, **fields)
        if config is None:
            flags = ", ".join("--" + name.replace("_", "-") for name in given)
            raise ValueError(f"{flags}: nothing drafts; name what is to with --speculate NAME")
        return config

    def _capture(self) -> CaptureConfig:
        file = self.capture_config
        config = CaptureConfig() if file is None else CaptureConfig.from_toml(file)
        if self.graph is not None:
            config = dataclasses.replace(config, graph=cast(GraphKind, self.graph))
        if self.compile is not None:
            config = dataclasses.replace(config, compile=cast(CompileMode, self.compile))
        return dataclasses.replace(config, lazy=True) if self.lazy else config


@dataclass(frozen=True, kw_only=True, slots=True)
class DisplayOptions:
    """Flags of what is shown beside an answer."""

    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Colour tokens by where they came from.")
    ] = False
    stats: Annotated[bool, typer.Option(help="Print figures of each answer on stderr.")] = True


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOptions:
    """Flags of how tokens are chosen; None: not given."""

    model_defaults: Annotated[
        bool,
        _option(_SAMPLING, "--model-defaults", "What the checkpoint recommends; flags win."),
    ] = False
    temperature: Annotated[
        float | None,
        _option(_SAMPLING, "--temperature", "0, the default: greedy; above: sampling."),
    ] = None
    top_k: Annotated[
        int | None, _option(_SAMPLING, "--top-k", "Only the K most likely tokens; 0: all.", "K")
    ] = None
    top_p: Annotated[
        float | None,
        _option(_SAMPLING, "--top-p", "Only the likeliest that have this probability.", "P"),
    ] = None
    min_p: Annotated[
        float | None,
        _option(_SAMPLING, "--min-p", "Only tokens P times as likely as the likeliest.", "P"),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        _option(_SAMPLING, "--repetition-penalty", "Of tokens in prompt and answer; 1: off."),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        _option(_SAMPLING, "--frequency-penalty", "Times a token's count in the answer; 0: off."),
    ] = None
    presence_penalty: Annotated[
        float | None,
        _option(_SAMPLING, "--presence-penalty", "Of tokens in the answer; 0: off."),
    ] = None
    seed: Annotated[
        int | None,
        _option(_SAMPLING, "--seed", "The same seed gives the same answer.", "N"),
    ] = None

    def params(self, model: str, max_tokens: int | None, default_max_tokens: int) -> SamplingParams:
        """What the flags ask for, before the engine starts.

        Args:
            model: looked into for its defaults where they are asked for.
            max_tokens: of the flag; None: not given.
            default_max_tokens: where neither flag nor checkpoint says.

        Raises:
            ValueError: a flag or the checkpoint has a value that is not allowed, or there is no
                such model.
        """
        names = [field.name for field in dataclasses.fields(self) if field.name != "model_defaults"]
        flags = {"max_tokens": max_tokens} | {name: getattr(self, name) for name in names}
        given = {name: value for name, value in flags.items() if value is not None}
        defaults = (
            open_model(model).sampling_defaults if self.model_defaults else SamplingDefaults()
        )
        if "max_tokens" not in defaults.fields:
            given.setdefault("max_tokens", default_max_tokens)
        return defaults.params(**given)


def open_engine(model: str, config: EngineConfig) -> Engine:
    """Load and capture, with progress on stderr.

    Raises:
        ValueError: the model or the configuration is refused.
    """
    with start_progress() as progress:
        return Engine(model, config, progress=progress)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Spread every parameter of a command that is a dataclass of flags over its command line."""
    hints = get_type_hints(function, include_extras=True)
    signature = inspect.signature(function).parameters
    groups = {name: hints[name] for name in signature if dataclasses.is_dataclass(hints[name])}
    parameters = [
        parameter.replace(annotation=hints[name], kind=parameter.KEYWORD_ONLY)
        for name, parameter in signature.items()
        if name not in groups
    ]
    for group in groups.values():
        flags = get_type_hints(group, include_extras=True)
        parameters += [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=flags[field.name],
            )
            for field in dataclasses.fields(group)
        ]

    def spread(**values: Any) -> None:
        for name, group in groups.items():
            names = [field.name for field in dataclasses.fields(group)]
            values[name] = group(**{field: values.pop(field) for field in names})
        function(**values)

    spread.__name__ = function.__name__
    spread.__doc__ = function.__doc__
    spread.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    spread.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return spread
