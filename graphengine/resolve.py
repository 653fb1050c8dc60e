"""Resolution: every size that follows from a checkpoint's config and a user's configuration.

Owns the defaults that depend on the checkpoint and the checks across fields. Reads headers, those
of a draft's checkpoint too, but no weights, and allocates nothing: what it refuses is refused at
once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from capture.manager import resolve_graph_kind
from capture.shapes import DEFAULT_DRAFT_LENGTHS, ShapeTable
from graphengine.config import (
    AttentionKind,
    EngineConfig,
    check_compile_mode,
    is_native,
    resolve_device,
    resolve_dtype,
)
from graphengine.draft_site import plan_draft
from graphengine.kv.cache import resolve_num_blocks
from graphengine.models.config import ModelConfig
from graphengine.models.factory import check_supported
from graphengine.models.loader import OpenedModel
from graphengine.scheduler import SchedulerConfig
from graphengine.speculative_config import SpeculativeConfig
from proposers import registry
from proposers.device import DraftPlan

GREEDY = "greedy"  # tier of steps whose every row is T = 0 without an active processor
SAMPLED = "sampled"  # tier of others: the whole processor stack
LOGPROBS = "logprobs"  # as SAMPLED, and what was likely is given out
# Two graphs around a request's own logits processors: up to the logits, and from them on.
LOGITS = "logits"
CUSTOM = "custom"
TIERS = (GREEDY, SAMPLED, LOGPROBS)
CUSTOM_TIERS = (LOGITS, CUSTOM)
MAX_PREFILL_ROWS = 256  # rows of one prefill forward; longer chunks take several
DEFAULT_MAX_MODEL_LEN = 8192
DEFAULT_BATCHED_TOKENS = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerSizes:
    """Sizes of the model runner's buffers."""

    max_num_seqs: int
    max_draft_tokens: int
    max_model_len: int
    block_size: int
    rejection: bool = False  # verification: drafts may come with the distribution they are from
    custom_logits: bool = False  # requests may bring logits processors
    lookahead: int = 0  # tokens behind its own that a slot's draft KV depends on

    @property
    def num_state_rows(self) -> int:
        """Rows of per-request inputs; at least 2, since torch specialises on size 1."""
        return max(2, self.max_num_seqs)

    @property
    def max_cell_tokens(self) -> int:
        """Rows of the largest cell."""
        return self.num_state_rows * (self.max_draft_tokens + 1)

    @property
    def max_num_tokens(self) -> int:
        """Rows of the largest forward beside the cells: of a prompt, or that extends drafts."""
        window = self.num_state_rows * (self.max_draft_tokens + self.lookahead)
        return max(MAX_PREFILL_ROWS, window)

    @property
    def max_blocks(self) -> int:
        """Width of a block table."""
        return -(-self.max_model_len // self.block_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedConfig:
    """Everything that follows from a checkpoint and a configuration."""

    model: ModelConfig
    device: torch.device
    dtype: torch.dtype
    speculative: SpeculativeConfig | None  # None: off
    sizes: RunnerSizes
    table: ShapeTable
    scheduler: SchedulerConfig
    num_blocks: int
    draft: DraftPlan | None = None  # of a proposer that carries a model
    attention: AttentionKind = "auto"
    async_steps: int = 0


def resolve(
    model: ModelConfig, config: EngineConfig, checkpoint: OpenedModel | None = None
) -> ResolvedConfig:
    """Resolve and check every choice and size; reads no weights.

    Args:
        checkpoint: the target's, for proposers that carry a model.

    Raises:
        ValueError: naming the field that is out of range or contradicts another.
    """
    dtype = resolve_dtype(config.dtype, model.dtype)
    check_supported(model, dtype)
    device = _resolve_device(config)
    speculative = SpeculativeConfig.resolve(config.speculative)
    _check_async_steps(config, speculative)
    max_draft_tokens = 0 if speculative is None else speculative.max_draft_tokens
    max_model_len = _resolve_max_model_len(config, model)
    batched = _resolve_batched_tokens(config, max_model_len, max_draft_tokens)
    draft = None
    if speculative is not None and checkpoint is not None:
        draft = plan_draft(speculative, checkpoint, dtype=dtype, max_model_len=max_model_len)
    sizes = RunnerSizes(
        max_num_seqs=config.max_num_seqs,
        max_draft_tokens=max_draft_tokens,
        max_model_len=max_model_len,
        block_size=config.cache.block_size,
        rejection=speculative is not None and speculative.verification == "rejection",
        custom_logits=config.logits_processors,
        lookahead=draft.lookahead if draft is not None else 0,
    )
    return ResolvedConfig(
        model=model,
        device=device,
        dtype=dtype,
        speculative=speculative,
        sizes=sizes,
        table=_make_table(config, sizes, speculative),
        scheduler=SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=batched,
            max_model_len=max_model_len,
            enable_chunked_prefill=config.cache.enable_chunked_prefill,
            enable_prefix_caching=config.cache.enable_prefix_caching,
        ),
        num_blocks=resolve_num_blocks(
            config.cache,
            model,
            dtype,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            draft=draft,
        ),
        draft=draft,
        attention=config.attention,
        async_steps=config.async_steps,
    )


def _resolve_device(config: EngineConfig) -> torch.device:
    """Where the engine lives, which must be able to run what the configuration asks for."""
    device = resolve_device(config.device)
    check_compile_mode(config.capture, device)
    if is_native(config.capture, device) and config.attention not in ("auto", "native"):
        raise ValueError(
            f"attention={config.attention!r}: allowed on device {device.type} are auto, native"
        )
    resolve_graph_kind(config.capture, device)
    return device


def _make_table(
    config: EngineConfig, sizes: RunnerSizes, speculative: SpeculativeConfig | None
) -> ShapeTable:
    """The cells: the ladders that were asked for, and the lengths that a rule may choose."""
    capture = config.capture
    if speculative is not None and speculative.chosen_lengths:
        defaults = [k for k in DEFAULT_DRAFT_LENGTHS if k <= sizes.max_draft_tokens]
        ladder = capture.draft_lengths or defaults
        capture = replace(capture, draft_lengths=(*ladder, *speculative.chosen_lengths))
    return ShapeTable.from_config(
        capture,
        max_num_seqs=sizes.max_num_seqs,
        max_draft_tokens=sizes.max_draft_tokens,
        tiers=TIERS + (CUSTOM_TIERS if sizes.custom_logits else ()),
    )


def _check_async_steps(config: EngineConfig, speculative: SpeculativeConfig | None) -> None:
    """Refuse drafts that cannot be made or verified before the host has seen the last step."""
    if not config.async_steps or speculative is None:
        return
    if registry.find(speculative.method).info.needs_tokens:
        why = (
            f"proposer {speculative.method!r} needs the tokens of a step on the host before the "
            "next"
        )
    elif speculative.override is not None:
        why = f"override={speculative.override!r} matches the text of the step before on the host"
    elif speculative.verification == "rejection":
        why = "verification='rejection' takes the drafts' distributions over the host"
    else:
        return
    raise ValueError(
        f'async_steps={config.async_steps}: {why}; use async_steps=0, or speculative="off"'
    )


def _resolve_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    most = model.max_position_embeddings
    max_model_len = config.max_model_len or min(most, DEFAULT_MAX_MODEL_LEN)
    if max_model_len > most:
        raise ValueError(
            f"max_model_len={max_model_len}: the checkpoint's limit is max_position_embeddings="
            f"{most}; lower max_model_len"
        )
    return max_model_len


def _resolve_batched_tokens(config: EngineConfig, max_model_len: int, max_draft_tokens: int) -> int:
    """Rows a step: the user's number if it can work, else a default that can."""
    rows_of_decode = config.max_num_seqs * (max_draft_tokens + 1)
    # Unchunked, the longest prompt must fit one step, here beside everybody else's row.
    whole_prompt = max_model_len + config.max_num_seqs
    if config.cache.enable_chunked_prefill:
        whole_prompt = 0
    batched = config.max_num_batched_tokens
    if batched is None:
        return max(DEFAULT_BATCHED_TOKENS, rows_of_decode, whole_prompt)
    least = max(config.max_num_seqs, max_draft_tokens + 1)
    if batched < least:
        raise ValueError(
            f"max_num_batched_tokens={batched}: expected an integer >= {least}, a row for each of "
            f"max_num_seqs={config.max_num_seqs} requests, and the {max_draft_tokens + 1} rows of "
            f"one verify step of max_draft_tokens={max_draft_tokens}"
        )
    return batched
