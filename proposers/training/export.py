"""Trained drafts as public checkpoints: a folder with config.json and model.safetensors.

EAGLE-3 in the format of the `speculators` package, EAGLE-1 in that of its authors, MTP under MiMo's
names, a draft model as an ordinary Llama. Knows formats, not training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from proposers.training.draft_vocab import d2t, t2d
from proposers.training.heads import Draft
from proposers.training.target import LayerSizes, Target

Tensor = torch.Tensor

SPECULATORS_VERSION = "0.9.0"  # whose format is written


def save_checkpoint(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> None:
    """Write both files; floating-point tensors are rounded to `dtype`."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in tensors.items()
    }
    contiguous = {name: tensor.contiguous() for name, tensor in stored.items()}
    data = save(contiguous, metadata={"format": "pt"})
    (folder / "model.safetensors").write_bytes(data)
    text = json.dumps({**config, "torch_dtype": str(dtype).removeprefix("torch.")}, indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def llama_config(sizes: LayerSizes, target: Target, *, num_layers: int) -> dict[str, Any]:
    """What a config.json says of layers of these sizes over the target's vocabulary."""
    eos = target.eos_token_ids
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": target.vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": target.max_position_embeddings,
        "rms_norm_eps": sizes.rms_norm_eps,
        "rope_theta": sizes.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
    }


def eagle3_config(
    sizes: LayerSizes,
    target: Target,
    *,
    taps: Sequence[int],
    draft_vocab_size: int,
    speculative_tokens: int,
    flags: Mapping[str, bool],
) -> dict[str, Any]:
    """The config of a `speculators` checkpoint.

    `eagle_aux_hidden_state_layer_ids` counts inputs of layers, as that package does: id t is the
    residual stream that goes into layer t, which is the one after t layers.
    """
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "transformer_layer_config": llama_config(sizes, target, num_layers=1),
        "draft_vocab_size": draft_vocab_size,
        "target_hidden_size": target.sizes.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(taps),
        **flags,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": speculative_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": target.name, "architectures": [target.architecture]},
        },
    }


def eagle3_tensors(draft: Draft, draft_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Parameters and the two tables of the draft vocabulary; the embedding stays the target's."""
    tables = {"d2t": d2t(draft_ids), "t2d": t2d(draft_ids, vocab_size)}
    return {**draft.state_dict(), **tables}


def eagle1_config(sizes: LayerSizes, target: Target) -> dict[str, Any]:
    """A Llama's config of one layer, and that `fc` has no bias."""
    return {**llama_config(sizes, target, num_layers=1), "bias": False}


def eagle1_tensors(draft: Draft, target: Target) -> dict[str, Tensor]:
    """Parameters, and the target's embedding, which the format has."""
    return {**draft.state_dict(), "embed_tokens.weight": target.embed}


def mtp_config(sizes: LayerSizes, target: Target) -> dict[str, Any]:
    """The target's sizes under MiMo's names, with one prediction layer."""
    return {
        **llama_config(sizes, target, num_layers=target.num_layers),
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "num_nextn_predict_layers": 1,
    }


def draft_model_config(sizes: LayerSizes, target: Target, *, num_layers: int) -> dict[str, Any]:
    """A Llama's config; its embedding is its output matrix."""
    config = llama_config(sizes, target, num_layers=num_layers)
    return {**config, "tie_word_embeddings": True}


def prefixed(draft: Draft) -> dict[str, Tensor]:
    """Parameters under the `model.` of whole models."""
    return {f"model.{name}": tensor for name, tensor in draft.state_dict().items()}
