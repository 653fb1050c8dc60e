"""The sampler as plain loops over one row: what the kernels must give, and slow.

Processors in the order of transformers: bias, penalties, masks, temperature, top-k, top-p, min-p.
Float64, except that temperature and thresholds apply to float32 numbers, as they do in the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from graphengine.sampling.noise import ACCEPTANCE, RESIDUAL, TARGET, gumbels, uniforms

MINUS_INFINITY = float("-inf")


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """Parameters of a row; the defaults change nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed: Collection[int] | None = None  # None: every token
    seed: int = 0
    choice: int = 0


def process(
    logits: Sequence[float], settings: RowSettings, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """Processed logits of one row: -inf for what cannot come, else relative to the likeliest.

    Args:
        prompt, output: the tokens before the row; drafts before it are output.
    """
    row = []
    for token, logit in enumerate(logits):
        x = float(np.float32(logit + settings.logit_bias.get(token, 0.0)))
        x = _penalised(x, settings, token in prompt, list(output).count(token))
        allowed = settings.allowed is None or token in settings.allowed
        row.append(x if allowed else MINUS_INFINITY)
    largest = max((x for x in row if not math.isnan(x)), default=MINUS_INFINITY)
    if settings.temperature == 0 or largest == MINUS_INFINITY:
        return row
    row = [_scaled(x, largest, settings.temperature) for x in row]
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    if 0 < settings.top_k < len(row):
        lowest = row[order[settings.top_k - 1]]  # and all that are equal to it
        row = [x if x >= lowest else MINUS_INFINITY for x in row]
    if settings.top_p < 1:
        target = settings.top_p * sum(map(math.exp, row))
        mass = 0.0
        for token in order:
            if mass >= target:
                row[token] = MINUS_INFINITY
            mass += math.exp(row[token])
    if settings.min_p > 0:
        row = [x if x >= np.float32(math.log(settings.min_p)) else MINUS_INFINITY for x in row]
    return row


def sample(processed: Sequence[float], settings: RowSettings, position: int) -> int:
    """The token at `position` of the request, the row's index of the largest; lowest id on ties."""
    values = np.array(processed)
    if settings.temperature > 0 and values.max(initial=MINUS_INFINITY) > MINUS_INFINITY:
        values = values + gumbels(
            settings.seed,
            position=position,
            stream=TARGET,
            choice=settings.choice,
            count=len(processed),
        )
    numbers = [x for x in values if not math.isnan(x)]
    return list(values).index(max(numbers)) if numbers else 0


def reject(
    processed: Sequence[float],
    draft: int,
    draft_probs: Sequence[float] | None,
    settings: RowSettings,
    position: int,
) -> int:
    """The draft where it is accepted, else the token in its place (Leviathan et al. 2023, alg. 1).

    Args:
        processed: of the row before the draft; temperature > 0 and at least one number.
        draft_probs: q, by which the draft was drawn; None: it was certain.
        position: the draft's.
    """
    p = np.exp(processed) / np.exp(processed).sum()
    q = np.eye(len(p))[draft] if draft_probs is None else np.array(draft_probs)
    place = {"position": position, "choice": settings.choice, "count": len(p)}
    u = uniforms(settings.seed, stream=ACCEPTANCE, **place)[draft]
    if u * q[draft] < p[draft]:
        return draft
    rest = np.maximum(p - q, 0)
    noise = gumbels(settings.seed, stream=RESIDUAL, **place)
    with np.errstate(divide="ignore"):
        return int(np.argmax(np.log(rest if rest.any() else p) + noise))


def _penalised(x: float, settings: RowSettings, in_prompt: bool, count: int) -> float:
    if count or in_prompt:
        penalty = np.float32(settings.repetition_penalty)
        x = float(np.float32(x) / penalty if x > 0 else np.float32(x) * penalty)
    x = float(np.float32(x) - np.float32(count) * np.float32(settings.frequency_penalty))
    return float(np.float32(x) - np.float32(settings.presence_penalty if count else 0.0))


def _scaled(x: float, largest: float, temperature: float) -> float:
    if math.isinf(largest):
        return 0.0 if x == largest else MINUS_INFINITY
    y = float((np.float32(x) - np.float32(largest)) / np.float32(temperature))
    return y if y <= 0 else MINUS_INFINITY  # NaN too
