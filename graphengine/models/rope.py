"""Rotary position tables: cos and sin for every position, computed once at start.

The operations, their order and their fp32 rounding are those of transformers' `ROPE_INIT_FUNCTIONS`
and rotary embedding modules, so the tables equal theirs bit for bit. Knows nothing of devices or
attention.
"""

import math

import torch
from torch import Tensor

from graphengine.models.config import ModelConfig, RopeConfig


def rope_tables(config: ModelConfig, max_len: int) -> tuple[Tensor, Tensor]:
    """Cos and sin of every rotation angle, yarn's attention factor multiplied in.

    Args:
        config: The model; its `rope` and `head_dim` are read.
        max_len: Number of positions, at least 1.

    Returns:
        Two fp32 CPU tensors `[max_len, head_dim // 2]`. Dimension i of a head rotates with
        dimension i + head_dim // 2 (the "half" layout of Hugging Face checkpoints).
    """
    if max_len < 1:
        raise ValueError(f"max_len must be at least 1, got {max_len}")
    inv_freq, attention_factor = _inverse_frequencies(config.rope, config.head_dim)
    freqs = torch.arange(max_len)[:, None].float() * inv_freq  # [max_len, head_dim // 2]
    return freqs.cos() * attention_factor, freqs.sin() * attention_factor


def _inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies `[head_dim // 2]` in fp32, and the factor on cos and sin."""
    pos_freqs = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim)
    inv_freq = 1.0 / pos_freqs
    if rope.kind == "yarn":
        return _yarn(rope, head_dim, pos_freqs), _yarn_attention_factor(rope)
    if rope.kind == "llama3":
        return _llama3(rope, inv_freq), 1.0
    if rope.kind == "linear":
        return inv_freq / rope.factor, 1.0
    assert rope.kind == "default", f"no rope formula for {rope.kind}"
    if rope.frequency_factors is not None:
        inv_freq = inv_freq / torch.tensor(rope.frequency_factors, dtype=torch.float)
    return inv_freq, 1.0


def _llama3(rope: RopeConfig, inv_freq: Tensor) -> Tensor:
    """Long wavelengths divided by `factor`, short ones kept, a smooth ramp between."""
    old_len, low, high = (
        rope.original_max_position_embeddings,
        rope.low_freq_factor,
        rope.high_freq_factor,
    )
    wavelen = 2 * math.pi / inv_freq
    scaled = torch.where(wavelen > old_len / low, inv_freq / rope.factor, inv_freq)
    smooth = (old_len / wavelen - low) / (high - low)
    ramp = (1 - smooth) * scaled / rope.factor + smooth * scaled
    is_medium = ~(wavelen < old_len / high) * ~(wavelen > old_len / low)
    return torch.where(is_medium, ramp, scaled)


def _yarn(rope: RopeConfig, head_dim: int, pos_freqs: Tensor) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): kept and interpolated frequencies, blended."""
    extrapolation = 1.0 / pos_freqs
    interpolation = 1.0 / (rope.factor * pos_freqs)

    def correction_dim(rotations: float) -> float:
        length = rope.original_max_position_embeddings
        return (head_dim * math.log(length / (rotations * 2 * math.pi))) / (
            2 * math.log(rope.theta)
        )

    low, high = correction_dim(rope.beta_fast), correction_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the ramp would divide by zero
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    return interpolation * (1 - keep) + extrapolation * keep


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
