"""What the decoder needs to know about a model: `ModelConfig` and its `RopeConfig`.

These two are the only description of a checkpoint that the decoder reads. They check themselves, so
a constructed config is one the decoder can run. They know nothing of file formats: `hf_config.py`
and `gguf_config.py` build them.
"""

import math
from dataclasses import dataclass

import torch

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
MODEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary position embedding; every field of another kind than `kind` stays at its default.

    Attributes:
        kind: One of `ROPE_KINDS`.
        theta: Base wavelength (rope_theta).
        factor: Context extension factor; linear, llama3 and yarn.
        original_max_position_embeddings: Trained context in tokens; llama3 and yarn.
        low_freq_factor, high_freq_factor: llama3 only.
        attention_factor: Multiplies cos and sin; yarn only. None: derived from `factor` and the
            mscales.
        beta_fast, beta_slow: Rotations at the two ends of yarn's ramp.
        mscale, mscale_all_dim: Both set or neither; used by yarn when `attention_factor` is None.
        truncate: Whether yarn rounds the ends of its ramp to whole dimensions.
        frequency_factors: Divisors of the inverse frequencies, `[head_dim // 2]`; `default` only.
            GGUF files spell llama3 scaling this way (tensor `rope_freqs.weight`).
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    frequency_factors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ValueError(
                f"rope kind {self.kind!r} is not supported; allowed: {_listed(ROPE_KINDS)}"
            )
        _require_positive("rope theta", self.theta, above=1.0)
        if self.kind != "default" and not (math.isfinite(self.factor) and self.factor >= 1.0):
            raise ValueError(
                f"rope factor must be a number >= 1 for {self.kind}, got {self.factor!r}"
            )
        if self.kind in ("llama3", "yarn"):
            _require_positive(
                "rope original_max_position_embeddings", self.original_max_position_embeddings
            )
        if self.kind == "llama3":
            self._check_llama3()
        if self.kind == "yarn":
            self._check_yarn()
        if self.frequency_factors is not None:
            if self.kind != "default":
                raise ValueError(
                    f"rope frequency_factors go with kind 'default', not {self.kind!r}"
                )
            if not all(math.isfinite(f) and f > 0 for f in self.frequency_factors):
                raise ValueError("rope frequency_factors must all be finite and positive")

    def _check_llama3(self) -> None:
        _require_positive("rope low_freq_factor", self.low_freq_factor)
        _require_positive("rope high_freq_factor", self.high_freq_factor)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"rope high_freq_factor ({self.high_freq_factor}) must be greater than "
                f"low_freq_factor ({self.low_freq_factor})"
            )

    def _check_yarn(self) -> None:
        _require_positive("rope beta_fast", self.beta_fast)
        _require_positive("rope beta_slow", self.beta_slow)
        if self.beta_fast <= self.beta_slow:
            raise ValueError(
                f"rope beta_fast ({self.beta_fast}) must be greater than beta_slow "
                f"({self.beta_slow})"
            )
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            value = getattr(self, name)
            if value is not None:
                _require_positive(f"rope {name}", value)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """One decoder-only transformer of the Llama family, as the decoder runs it.

    Attributes:
        architecture: Registered architecture name, such as "LlamaForCausalLM".
        num_heads, num_kv_heads: Query heads and key/value heads; the first is a multiple of the
            second.
        head_dim: Width of one head; `num_heads * head_dim` may differ from `hidden_size`.
        max_position_embeddings: Longest context in tokens.
        tie_word_embeddings: Whether the output head is the embedding matrix.
        qkv_bias, o_bias, mlp_bias: Which projections add a bias.
        qk_norm: Whether queries and keys pass an RMS norm over `head_dim` before the rotation.
        sliding_window: A token sees itself and the `sliding_window - 1` tokens before it, in every
            layer; None: it sees them all. Set only where it can take effect, that is where it is
            smaller than `max_position_embeddings`.
        eos_token_ids: Ids that end generation; empty when the checkpoint names none.
        dtype: The dtype that the checkpoint asks to be run in.
        num_mtp_layers: Layers for multi-token prediction that lie in the checkpoint beside the
            model's own; the model does without them.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    num_mtp_layers: int = 0

    @property
    def q_size(self) -> int:
        """Rows of the query projection: `num_heads * head_dim`."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key projection, and of the value projection: `num_kv_heads * head_dim`."""
        return self.num_kv_heads * self.head_dim

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            _require_count(name, getattr(self, name))
        _require_positive("rms_norm_eps", self.rms_norm_eps)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})"
            )
        if self.head_dim % 8:
            raise ValueError(f"head_dim must be a multiple of 8, got {self.head_dim}")
        if self.dtype not in MODEL_DTYPES:
            raise ValueError(
                f"dtype {self.dtype} is not supported; allowed: {_listed(MODEL_DTYPES)}"
            )
        self._check_window()
        self._check_token_ids()
        factors = self.rope.frequency_factors
        if factors is not None and len(factors) != self.head_dim // 2:
            raise ValueError(
                f"rope frequency_factors has {len(factors)} values, expected head_dim // 2 = "
                f"{self.head_dim // 2}"
            )

    def _check_window(self) -> None:
        if self.sliding_window is None:
            return
        _require_count("sliding_window", self.sliding_window)
        if self.sliding_window >= self.max_position_embeddings:
            raise ValueError(
                f"sliding_window ({self.sliding_window}) never takes effect within "
                f"max_position_embeddings ({self.max_position_embeddings}); pass None"
            )

    def _check_token_ids(self) -> None:
        for value in self.eos_token_ids:
            if type(value) is not int or not 0 <= value < self.vocab_size:
                raise ValueError(
                    f"eos_token_ids holds {value!r}, which is not an id below vocab_size "
                    f"({self.vocab_size})"
                )


def _require_count(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")


def _require_positive(name: str, value: float, *, above: float = 0.0) -> None:
    if not math.isfinite(value) or value <= above:
        raise ValueError(f"{name} must be a finite number above {above:g}, got {value!r}")


def _listed(values: tuple[object, ...]) -> str:
    return ", ".join(str(v) for v in values)
