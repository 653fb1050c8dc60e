"""Tiny random checkpoints, made on the spot: the models that the tests run.

`make_checkpoint` writes a Hugging Face directory through transformers' own model classes, with a
byte tokenizer beside it; `make_gguf` rewrites one as a GGUF file; `tiny_matrix` names the
configurations that parity tests go through. Weights are fp32 and large enough that greedy text does
not repeat itself.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor

transformers.utils.logging.disable_progress_bar()

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
MERGES = (("t", "h"), ("th", "e"))
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
BOS_ID, EOS_ID = 258, 259  # after 256 bytes and 2 merges
# More rows than the tokenizer has ids (262), as in many real checkpoints.
VOCAB_SIZE = 264

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": None,
}
_ARCH_BASE: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
}

GQA = {
    "gqa1": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "gqa3": {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96},
    "gqa4": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "gqa8": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 8},
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyCase:
    """One named configuration: what to hand to `make_checkpoint`."""

    name: str
    arch: str
    overrides: dict[str, Any] = field(default_factory=dict)

    def make(self, directory: Path) -> Path:
        return make_checkpoint(directory, self.arch, **self.overrides)


def tiny_matrix() -> tuple[TinyCase, ...]:
    """Every architecture, head ratio, rope kind, bias, norm and tie, each at least once."""
    return tuple(_cases())


def _cases() -> Iterator[TinyCase]:
    for arch in ARCHITECTURES:
        yield TinyCase(name=arch, arch=arch)
        yield TinyCase(name=f"{arch}-tied", arch=arch, overrides={"tie_word_embeddings": True})
    for name, heads in GQA.items():
        yield TinyCase(name=f"llama-{name}", arch="llama", overrides=heads)
    yield TinyCase(name="mistral-gqa3", arch="mistral", overrides=GQA["gqa3"])
    yield TinyCase(name="qwen2-gqa4", arch="qwen2", overrides=GQA["gqa4"])
    yield TinyCase(name="qwen3-gqa8", arch="qwen3", overrides=GQA["gqa8"])
    for arch, kind in (
        ("llama", "linear"),
        ("llama", "llama3"),
        ("llama", "yarn"),
        ("qwen2", "yarn"),
    ):
        rope = {"rope_parameters": ROPES[kind]}
        yield TinyCase(name=f"{arch}-{kind}", arch=arch, overrides=rope)
    yield TinyCase(name="llama-bias", arch="llama", overrides={"attention_bias": True})
    yield TinyCase(
        name="llama-mlp-bias", arch="llama", overrides={"attention_bias": True, "mlp_bias": True}
    )
    yield TinyCase(name="qwen3-bias", arch="qwen3", overrides={"attention_bias": True})
    yield TinyCase(name="mistral-window", arch="mistral", overrides={"sliding_window": 24})
    yield TinyCase(
        name="qwen2-window",
        arch="qwen2",
        overrides={"sliding_window": 24, "use_sliding_window": True, "max_window_layers": 0},
    )


def make_checkpoint(
    directory: Path,
    arch: str = "llama",
    *,
    seed: int = 0,
    max_shard_size: str | int = "1GB",
    tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """Write a random fp32 checkpoint and return its directory.

    Args:
        directory: Created if missing.
        arch: One of `ARCHITECTURES`.
        seed: Of the weights.
        max_shard_size: Small values ("60KB") give several safetensors files with an index.
        tokenizer: Whether to write the byte tokenizer beside it.
        overrides: Fields of transformers' config class.
    """
    model = make_model(arch, seed=seed, **overrides)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    if tokenizer:
        make_tokenizer().save_pretrained(directory)
    return directory


def make_model(arch: str, *, seed: int = 0, **overrides: Any) -> Any:
    """The transformers model that `make_checkpoint` saves, in eval mode."""
    name = ARCHITECTURES[arch]
    config_class = getattr(transformers, name.replace("ForCausalLM", "Config"))
    config = config_class(**{**_BASE, **_ARCH_BASE[arch], **overrides})
    with torch.device("meta"):
        model = getattr(transformers, name)(config)
    model = model.to_empty(device="cpu").eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers were on meta
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            _fill(parameter_name, parameter, generator)
    model.tie_weights()
    return model


def _fill(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    noise = torch.randn(parameter.shape, generator=generator)
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        parameter.copy_(2.0 + 0.4 * noise)  # sharp attention: what it sees decides the next token
    elif name.endswith("norm.weight"):
        parameter.copy_(1.0 + 0.2 * noise)
    elif "embed_tokens" in name or "lm_head" in name:
        # Small beside what the layers add, or a tied model would only repeat its input.
        parameter.copy_(0.05 * noise)
    else:
        parameter.copy_(0.25 * noise)


def make_tokenizer() -> Any:
    """A byte-level tokenizer: 256 byte tokens, those of `MERGES`, then `SPECIAL_TOKENS`."""
    vocab = {token: i for i, token in enumerate(_plain_tokens())}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(MERGES)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    backend.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", BOS_ID)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _plain_tokens() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(pair) for pair in MERGES]


_GGUF_ARCH = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def make_gguf(
    checkpoint: Path,
    path: Path,
    *,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    general: dict[str, Any] | None = None,
) -> Path:
    """Rewrite a checkpoint of `make_checkpoint` (one safetensors file) as GGUF, and return `path`.

    Args:
        quantization: Of the matrices; norms and biases stay F32. Block formats need widths that are
            multiples of 32.
        metadata: Further keys under the architecture's name; int, float, str or bool.
        general: Further keys, spelled out; int or float.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    arch = _GGUF_ARCH[config["model_type"]]
    writer = gguf.GGUFWriter(path, arch)
    _write_metadata(writer, config)
    for key, value in (metadata or {}).items():
        kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        kinds.get(type(value), writer.add_string)(f"{arch}.{key}", value)
    for key, value in (general or {}).items():
        {int: writer.add_int32, float: writer.add_float32}[type(value)](key, value)
    _write_tokenizer(writer, checkpoint)
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        stored, kind = name.rsplit(".", 1)
        layer, inner = "", stored
        if stored.startswith("model.layers."):
            _, _, index, inner = stored.split(".", 3)
            layer = f"blk.{index}."
        data = _stored_rows(tensor, inner, config, arch).numpy()
        encoding = quantization if data.ndim == 2 else gguf.GGMLQuantizationType.F32
        if encoding != gguf.GGMLQuantizationType.F32:
            data = gguf.quants.quantize(data, encoding)
        writer.add_tensor(f"{layer}{_GGUF_NAMES[inner]}.{kind}", data, raw_dtype=encoding)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _stored_rows(tensor: Tensor, inner: str, config: dict[str, Any], arch: str) -> Tensor:
    """Llama files interleave the two halves of each q and k head."""
    heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}
    if arch != "llama" or inner not in heads:
        return tensor.contiguous()
    num_heads = config[heads[inner]]
    halves = tensor.reshape(num_heads, 2, tensor.shape[0] // num_heads // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()


def _write_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = config["rope_parameters"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, config["head_dim"]))


def _llama3_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Frequency divisors as llama.cpp's converter writes them."""
    freqs = 1.0 / rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    context, low, high = (
        rope["original_max_position_embeddings"],
        rope["low_freq_factor"],
        rope["high_freq_factor"],
    )
    wavelen = 2 * np.pi / freqs
    smooth = (context / wavelen - low) / (high - low)
    ramp = 1 / ((1 - smooth) / rope["factor"] + smooth)
    factors = np.where(wavelen < context / high, 1.0, ramp)
    return np.where(wavelen > context / low, rope["factor"], factors).astype(np.float32)


def _write_tokenizer(writer: gguf.GGUFWriter, checkpoint: Path) -> None:
    if not (checkpoint / "tokenizer.json").is_file():
        return
    tokens = [*_plain_tokens(), *SPECIAL_TOKENS]
    types = [gguf.TokenType.NORMAL] * (len(tokens) - len(SPECIAL_TOKENS))
    types += [gguf.TokenType.CONTROL] * len(SPECIAL_TOKENS)
    padding = [f"[PAD{i}]" for i in range(len(tokens), VOCAB_SIZE)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens + padding)
    writer.add_token_types(types + [gguf.TokenType.UNUSED] * len(padding))
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)
