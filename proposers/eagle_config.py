"""EagleConfig: what the config.json of an EAGLE head means, whichever public form it has.

Four forms: the EAGLE repository's (a Llama config with a few keys more), SpecForge's and NVIDIA's
(the same with an `eagle_config` object), and that of `speculators` (a `transformer_layer_config`).
Knows of the weights nothing but their names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from proposers.device import FINAL, Tap
from proposers.eagle_settings import AUX_LAYERS, Settings, count, refusal

_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
_CLASS = re.compile(
    rf"(Eagle3?)?(?:({'|'.join(_FAMILIES)})ForCausalLM(Eagle3?)?|Speculator|DraftModel)"
)
_CLASSES = (
    "Eagle3Speculator, Eagle3DraftModel, or XForCausalLM, XForCausalLMEagle, XForCausalLMEagle3, "
    f"EagleXForCausalLM, Eagle3XForCausalLM with X one of {', '.join(_FAMILIES)}"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleConfig:
    """One head.

    Attributes:
        version: 1 (EAGLE-1 and 2): the projection joins embedding and feature, and attention reads
            what it gives. 3: it joins hidden states of the target to a feature, and attention
            reads embedding and feature.
        layer: its layers, as `DraftSite.read_architecture` reads them.
        vocab_size: ids that may be embedded.
        draft_vocab_size: columns of its logits; None: the target's vocabulary.
        target_hidden_size: None: that of the head.
        taps: hidden states of the target, in the order of the projection's columns.
        has_fc: whether there is a projection; without one the one tap is the feature.
        fc_bias: whether it has a bias.
        norm_before_fc: one norm over all taps, in front of the projection.
        fc_norm: a norm for each tap, in front of the projection.
        norm_before_residual: the residual stream begins with the normed feature.
        norm_output: what the final norm gives is handed on, not what goes into it.
    """

    version: Literal[1, 3]
    layer: Mapping[str, Any]
    vocab_size: int
    draft_vocab_size: int | None
    target_hidden_size: int | None
    taps: tuple[Tap, ...]
    has_fc: bool
    fc_bias: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_before_residual: bool
    norm_output: bool

    def __post_init__(self) -> None:
        if self.norm_before_fc and self.fc_norm:
            raise refusal("fc_norm", True, "false where norm_before_fc is true")
        is_1 = self.version == 1
        foreign = {
            "norm_before_fc": self.norm_before_fc and not self.projects_taps,
            "fc_norm": self.fc_norm and not self.projects_taps,
            "norm_before_residual": self.norm_before_residual and is_1,
            "norm_output": self.norm_output and is_1,
        }
        for key, is_on in foreign.items():
            if is_on:
                head = "an EAGLE-1 head" if is_1 else "a head without a projection"
                raise refusal(key, True, f"false for {head}")

    @property
    def projects_taps(self) -> bool:
        """Whether the projection reads the target's states and nothing else."""
        return self.version == 3 and self.has_fc


def read_eagle_config(
    raw: Mapping[str, Any], names: Collection[str], *, num_target_layers: int
) -> EagleConfig:
    """Read a config.json.

    Args:
        raw: its contents.
        names: of the checkpoint's tensors, as in the layout of `speculators`: a `hidden_norm` is
            what tells EAGLE-3 from EAGLE-1.
        num_target_layers: of the target.

    Raises:
        ValueError: a head of another kind, or a key whose value is not possible or not supported;
            the message names key, value and what is allowed.
    """
    settings = Settings(raw)
    version: Literal[1, 3] = 3 if "layers.0.hidden_norm.weight" in names else 1
    settings.refuse_unknown(version)
    layer = _read_layer(settings, version)
    vocab_size = count("vocab_size", layer.get("vocab_size"))
    has_fc = version == 1 or settings.flag("use_aux_hidden_state", default=True)
    return EagleConfig(
        version=version,
        layer=layer,
        vocab_size=vocab_size,
        draft_vocab_size=settings.count("draft_vocab_size")
        or (vocab_size if version == 3 else None),
        target_hidden_size=settings.count("target_hidden_size"),
        taps=_read_taps(settings, num_target_layers) if version == 3 and has_fc else (FINAL,),
        has_fc=has_fc,
        fc_bias=settings.flag("bias", default=version == 1),
        norm_before_fc=settings.flag("norm_before_fc"),
        fc_norm=settings.flag("fc_norm"),
        norm_before_residual=settings.flag("norm_before_residual"),
        norm_output=settings.flag("norm_output"),
    )


def _read_taps(settings: Settings, num_layers: int) -> tuple[Tap, ...]:
    """The aux layers as taps: after so many layers of the target.

    An id counts the layers in front of the state (the *input* of layer id: the tap is the id), or
    names the layer that gives it (its *output*: the tap is id + 1). Which, is told by its place:

    * absent: the EAGLE repository records the inputs of layers 2, N // 2 and N - 3;
    * at the top level, and so in `speculators`: inputs. vLLM, for which the key was made, records
      the residual stream in front of layer id; `speculators` allows 0 to N, N being the end;
    * in `eagle_config`: outputs where the first is 1, else inputs. Model-Optimizer and SpecForge
      hook a layer's output, by default of 1, N // 2 - 1 and N - 4, the same states as above; later
      heads of NVIDIA's count layers in front (24, 30, 36 of 36, for which its TensorRT-LLM recipe
      names the outputs 23, 29, 35). SGLang goes by the first id, too.
    """
    ids = settings.get(AUX_LAYERS)
    if ids is None:
        taps, how = [2, num_layers // 2, num_layers - 3], "is the default"
    else:
        if not isinstance(ids, list) or not ids or any(type(one) is not int for one in ids):
            raise refusal(AUX_LAYERS, ids, "a list of integers")
        are_outputs = settings.is_nested(AUX_LAYERS) and ids[0] == 1
        taps = [one + 1 for one in ids] if are_outputs else list(ids)
        how = f"means {'outputs' if are_outputs else 'inputs'} of layers"
    ascends = all(low < high for low, high in pairwise(taps))
    if not ascends or taps[0] < 0 or taps[-1] > num_layers:
        raise refusal(
            AUX_LAYERS,
            ids,
            f"ids of states after 0 to {num_layers} layers, the target's number, in ascending "
            f"order; this {how}, the states after {taps} layers (a head for another target?)",
        )
    if settings.count("num_aux_hidden_states") not in (None, len(taps)):
        given = settings.get("num_aux_hidden_states")
        raise refusal("num_aux_hidden_states", given, f"{len(taps)}, as many as aux layers")
    return tuple(taps)


def _read_layer(settings: Settings, version: int) -> dict[str, Any]:
    """The head's layers as a config of their own: a model_type, and no class name."""
    raw = given = settings.raw
    if raw.get("speculators_model_type") is not None:
        if raw["speculators_model_type"] != "eagle3":
            raise refusal("speculators_model_type", raw["speculators_model_type"], "'eagle3'")
        if raw.get("norm_before_residual") is None:
            # Where it is absent, speculators takes it for false and vLLM for true.
            raise refusal("norm_before_residual", None, "true or false, as the head was trained")
        given = raw.get("transformer_layer_config") or {}
        if not isinstance(given, Mapping) or not given:
            raise refusal("transformer_layer_config", given, "an object")
    for key in ("quantization_config", "compression_config"):
        for found in (raw.get(key), given.get(key)):
            if found is not None:
                raise refusal(key, found, "null: a head in float32 or bfloat16")
    layer = settings.layer_settings(given)
    layer["model_type"] = _model_type(raw.get("architectures"), given.get("model_type"), version)
    layer["architectures"] = None
    layer["eos_token_id"] = None  # of the target: a head ends nothing
    if layer.pop("qkv_bias", None) is True:  # the EAGLE repository's word for what Qwen2 does
        if layer["model_type"] not in ("llama", "qwen2"):
            raise refusal("qkv_bias", True, f"null for model_type {layer['model_type']!r}")
        layer["model_type"] = "qwen2"
        layer.setdefault("num_key_value_heads", layer.get("num_attention_heads"))
    return layer


def _model_type(names: object, model_type: object, version: int) -> object:
    """The family of the layers, checked against the class that the file names."""
    if names is None:
        return model_type
    match = _CLASS.fullmatch(names[0]) if isinstance(names, list) and len(names) == 1 else None
    if match is None:
        raise refusal("architectures", names, _CLASSES)
    before, family, behind = match.groups()
    said = before or behind
    if said is not None and (said == "Eagle3") != (version == 3):
        found = "hold a hidden_norm" if version == 3 else "hold no hidden_norm"
        raise refusal("architectures", names, f"a class of EAGLE-{version}, as the weights {found}")
    if family is None or model_type in (None, family.lower()):
        return model_type if family is None else family.lower()
    raise refusal("model_type", model_type, f"{family.lower()!r}, as architectures={names} says")
