"""config.json of EAGLE heads: every public form, two ways to count layers, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from proposers.eagle_config import EagleConfig, read_eagle_config
from tests.draft_heads import LAYER, Head

EAGLE3 = ["layers.0.hidden_norm.weight"]
EAGLE1 = ["layers.0.mlp.up_proj.weight"]
IDS = "eagle_aux_hidden_state_layer_ids"
NUM_LAYERS = 36


def read(raw: dict[str, Any], names: list[str] = EAGLE3) -> EagleConfig:
    return read_eagle_config(raw, names, num_target_layers=NUM_LAYERS)


def llama(**more: Any) -> dict[str, Any]:
    """As the EAGLE repository writes it."""
    return {**LAYER, "architectures": ["LlamaForCausalLM"], **more}


def speculators(**more: Any) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x"}},
        "draft_vocab_size": 100,
        "norm_before_residual": True,
        "transformer_layer_config": dict(LAYER),
        **more,
    }


def test_eagle_1() -> None:
    """As published: no key tells it from EAGLE-3, whose layer has a norm more."""
    found = read(llama(), EAGLE1)
    assert (found.version, found.taps, found.draft_vocab_size) == (1, ("final",), None)
    assert found.fc_bias, "unless the file says otherwise"
    assert not read(llama(bias=False), EAGLE1).fc_bias


def test_eagle_3() -> None:
    found = read(llama(draft_vocab_size=32))
    assert (found.version, found.draft_vocab_size, found.fc_bias) == (3, 32, False)
    assert found.vocab_size == LAYER["vocab_size"]
    assert read(llama()).draft_vocab_size == LAYER["vocab_size"]
    flags = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm")
    assert not any(getattr(found, flag) for flag in flags)


def test_speculators_nest_the_layer() -> None:
    found = read(speculators(norm_output=True, target_hidden_size=128))
    assert found.norm_before_residual
    assert found.norm_output
    assert found.target_hidden_size == 128
    assert found.layer["hidden_size"] == LAYER["hidden_size"]
    assert found.layer["model_type"] == "llama"


@pytest.mark.parametrize("flag", ["norm_before_fc", "norm_before_residual", "norm_output"])
def test_flags_are_read_where_nvidia_nests_them(flag: str) -> None:
    """Guards acceptance that is lost in silence by reading the top level alone."""
    assert getattr(read(llama(eagle_config={flag: True})), flag)
    assert getattr(read(llama(**{flag: True}, eagle_config={flag: True})), flag)
    with pytest.raises(ValueError, match=f"{flag}=False is not supported; allowed: True, as eagle"):
        read(llama(**{flag: False}, eagle_config={flag: True}))


@pytest.mark.parametrize(
    ("raw", "taps"),
    [
        (llama(), (2, 18, 33)),  # the EAGLE repository: inputs of 2, N // 2, N - 3
        (speculators(), (2, 18, 33)),
        (speculators(**{IDS: [1, 18, 36]}), (1, 18, 36)),
        (llama(**{IDS: [1, 17, 32]}), (1, 17, 32)),  # vLLM: inputs, whatever the first is
        (llama(eagle_config={IDS: [1, 17, 32]}), (2, 18, 33)),  # outputs: the default once more
        (llama(eagle_config={IDS: [1, 17, 33]}), (2, 18, 34)),  # SpecForge's gpt-oss-120b
        (llama(eagle_config={IDS: [24, 30, 36]}), (24, 30, 36)),  # NVIDIA's Eagle3-v3
        (llama(eagle_config={IDS: [2, 18, 33]}), (2, 18, 33)),
        (llama(eagle_config={IDS: [1, 17, 32]}, **{IDS: [1, 17, 32]}), (1, 17, 32)),
        (llama(eagle_config={IDS: [7]}), (7,)),
        (llama(eagle_config={"use_aux_hidden_state": False}), ("final",)),
    ],
)
def test_layer_ids_in_one_convention(raw: dict[str, Any], taps: tuple[Any, ...]) -> None:
    """Guards case 35: the same number means different states by where it stands."""
    assert read(raw).taps == taps


@pytest.mark.parametrize("form", ["eagle", "nvidia", "vllm", "speculators"])
def test_the_forms_of_the_tests_are_read_as_meant(form: Any) -> None:
    """Guards the makers of random heads, on which all other tests stand."""
    head = Head(form=form, aux=(2, 18, 33), draft_vocab=100)
    found = read(head.config)
    assert (found.taps, found.draft_vocab_size) == (head.aux, 100)


@pytest.mark.parametrize(
    "raw",
    [
        llama(architectures=["LlamaForCausalLMEagle3"]),
        llama(architectures=["Eagle3LlamaForCausalLM"]),
        llama(architectures=["Qwen3ForCausalLMEagle3"], model_type="qwen3"),
        llama(architectures=["MistralForCausalLM"], model_type=None),
        speculators(architectures=["Eagle3DraftModel"]),
        llama(architectures=None),
    ],
)
def test_class_names(raw: dict[str, Any]) -> None:
    """Every class that heads are published under means one of the engine's families."""
    layer = read(raw).layer
    assert layer["architectures"] is None
    assert layer["model_type"] in ("llama", "qwen3", "mistral")


def test_qkv_bias_is_what_qwen2_does() -> None:
    """Guards EAGLE-1 heads of Qwen2 targets, whose config is a Llama's."""
    layer = read(llama(qkv_bias=True, num_key_value_heads=2), EAGLE1).layer
    assert layer["model_type"] == "qwen2"
    assert "qkv_bias" not in layer
    with pytest.raises(ValueError, match="qkv_bias=True is not supported"):
        read(llama(architectures=["Qwen3ForCausalLM"], model_type="qwen3", qkv_bias=True))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "p-eagle": (
        speculators(speculators_model_type="peagle"),
        "speculators_model_type='peagle' is of another kind of head, P-EAGLE.*use an EAGLE-3 head",
    ),
    "p-eagle by key": (
        llama(mask_token_id=7),
        "mask_token_id=7 is of another kind of head, P-EAGLE",
    ),
    "dflash": (llama(dflash_config={"mask_token_id": 1}), "dflash_config=.* DFlash"),
    "dflash by class": (
        llama(architectures=["DFlashDraftModel"]),
        r"architectures=\['DFlashDraftModel'\] is of another kind of head, DFlash.*of the same",
    ),
    "dspark": (speculators(speculators_model_type="dspark"), "DSpark, which"),
    "medusa": (llama(medusa_num_heads=4), "medusa_num_heads=4 is of another kind of head, Medusa"),
    "mtp": (llama(num_nextn_predict_layers=1), "kind of head, MTP, .*use proposer 'mtp'"),
    "speculators of a kind": (
        speculators(speculators_model_type="eagle"),
        "speculators_model_type='eagle' is not supported; allowed: 'eagle3'",
    ),
    "class": (llama(architectures=["GptOssForCausalLMEagle3"]), "GptOss.*allowed: Eagle3Speculat"),
    "class of another version": (
        llama(architectures=["LlamaForCausalLMEagle"]),
        "allowed: a class of EAGLE-3, as the weights hold a hidden_norm",
    ),
    "class and family": (llama(model_type="qwen2"), "model_type='qwen2'.*allowed: 'llama'"),
    "unknown norm": (llama(norm_of_all=True), "norm_of_all=True is not supported; allowed: False"),
    "unknown nested": (
        llama(eagle_config={"use_mtp_layernorm": True}),
        "use_mtp_layernorm=True is not supported; allowed: False",
    ),
    "anything nested": (llama(eagle_config={"colour": "red"}), "colour='red' is not supported"),
    "parallel": (llama(eagle_config={"parallel_draft_step": 4}), "parallel_draft_step=4"),
    "no first norm": (
        llama(eagle_config={"use_input_layernorm_in_first_layer": False}),
        "use_input_layernorm_in_first_layer=False is not supported; allowed: True",
    ),
    "other layers": (llama(target_layer_ids=[1, 10, 19]), "target_layer_ids="),
    "both norms": (llama(norm_before_fc=True, fc_norm=True), "fc_norm=True.*norm_before_fc"),
    "flag": (llama(norm_output="yes"), "norm_output='yes' is not supported; allowed: true or fal"),
    "count": (llama(draft_vocab_size=0), "draft_vocab_size=0.*a positive integer"),
    "residual unsaid": (
        speculators(norm_before_residual=None),
        "norm_before_residual=None is not supported; allowed: true or false",
    ),
    "nothing nested": (speculators(transformer_layer_config=None), "transformer_layer_config="),
    "nested what": (llama(eagle_config=3), "eagle_config=3.*allowed: an object"),
    "quantised": (llama(quantization_config={"bits": 4}), "quantization_config=.*null: a head in"),
    "quantised, it seems": (speculators(quantization_config={}), "quantization_config={}.*null"),
    "quantised layers": (
        speculators(transformer_layer_config=LAYER | {"quantization_config": {"bits": 4}}),
        "quantization_config=",
    ),
    "ids beyond": (
        llama(**{IDS: [2, 18, 37]}),
        r"\[2, 18, 37\].*0 to 36 layers.*inputs of layers, the states after \[2, 18, 37\] layers",
    ),
    "output of none": (llama(eagle_config={IDS: [1, 18, 36]}), r"outputs.*\[2, 19, 37\] layers"),
    "ids twice": (llama(**{IDS: [2, 2]}), r"\[2, 2\].*in ascending order"),
    "no ids": (llama(**{IDS: []}), r"\[\] is not supported; allowed: a list of integers"),
    "fewer ids than said": (llama(num_aux_hidden_states=4), "num_aux_hidden_states=4.*allowed: 3"),
    "no fc, its norm": (
        llama(eagle_config={"use_aux_hidden_state": False}, fc_norm=True),
        "fc_norm=True is not supported; allowed: false for a head without a projection",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_key_value_and_what_is_allowed(name: str) -> None:
    """Guards settings that are passed over in silence, which costs acceptance and nothing else."""
    raw, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"^config.json: .*{message}"):
        read(raw)


@pytest.mark.parametrize("flag", ["norm_output", "fc_norm", "norm_before_residual"])
def test_flags_of_eagle_3_in_eagle_1(flag: str) -> None:
    with pytest.raises(ValueError, match=f"{flag}=True.*allowed: false for an EAGLE-1 head"):
        read(llama(**{flag: True}), EAGLE1)


def test_defaults_that_a_small_target_has_no_layers_for() -> None:
    with pytest.raises(ValueError, match=r"=None.*is the default, the states after \[2, 2, 1\]"):
        read_eagle_config(llama(), EAGLE3, num_target_layers=4)


def test_what_is_known_to_do_nothing_passes() -> None:
    """Guards heads that are refused for a key of training, or for a layer's own settings."""
    inert = {"embed_requires_grad": True, "initializer_range": 0.02, "use_cache": True}
    nested = {"use_last_layernorm": True, "next_layer_regular": True, "parallel_draft_step": None}
    read(llama(**inert, pretraining_tp=1, eagle_config=nested))
    read(speculators(**inert, eagle_config=None))
