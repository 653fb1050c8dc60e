"""mtp through the engine: output as without it, targets that carry layers, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from graphengine import startup
from graphengine.engine import Engine
from graphengine.memory import plan_memory
from graphengine.sampling.params import SamplingParams
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Setup
from tests.mtp_checkpoints import FORMS, SINGLE_FILE, MtpCheckpoint, add_layers, make_mtp, write
from tests.parity.mtp_runs import (
    MakeMtp,
    cached_maker,
    make_perfect,
)
from tests.parity.test_self_draft import check_all_accepted, params
from tests.parity.workload import MAX_MODEL_LEN, answer_off, check_identity, make_jobs, off_setup
from tests.tiny import make_checkpoint, make_gguf

pytestmark = pytest.mark.parity

PROMPTS = ([5, 6, 7], [200], list(range(20, 40)))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MakeMtp:
    return cached_maker(tmp_path_factory.mktemp("mtp"), make_mtp)


@pytest.fixture(scope="module")
def perfect(tmp_path_factory: pytest.TempPathFactory) -> MtpCheckpoint:
    return make_perfect(tmp_path_factory.mktemp("perfect"), 2)


def serve(checkpoint: Path, setup: Setup, **options: Any) -> list[list[int]]:
    """Streams of a few requests, greedy and drawn."""
    harness = Harness(setup.start(checkpoint, **options))
    for index, prompt in enumerate(PROMPTS):
        for temperature in (0.0, 0.9):
            given = params(20, index, temperature=temperature)
            harness.add(f"{index}-{temperature}", prompt, given)
    harness.drain()
    harness.engine.close()
    return [harness.stream(name) for name in sorted(harness.outputs)]


@pytest.mark.parametrize(("num_layers", "dtype"), [(1, "bfloat16"), (3, "float32")])
def test_on_and_off_are_the_same(num_layers: int, dtype: str, made: MakeMtp) -> None:
    """Guards drafts that change an output: joins, aborts, stops, preemption, a shared cache."""
    checkpoint = made("deepseek", num_layers=num_layers)
    answers = answer_off(checkpoint.target, off_setup(dtype, "native"))
    jobs, expected = make_jobs(answers, seed=num_layers, num_requests=16)
    setup = Setup(k=4, dtype=dtype, max_num_seqs=5, max_model_len=MAX_MODEL_LEN, num_blocks=24)
    harness = Harness(setup.start(checkpoint.target, **checkpoint.options))
    harness.run(jobs)
    check_identity(harness, expected)
    stats = harness.engine.stats()
    assert stats.num_draft_tokens > 50
    assert stats.compile_events_after_warmup == 0
    harness.engine.close()


@pytest.mark.parametrize("sampling", ["greedy", "coupled"])
def test_drawn_outputs_are_the_same(sampling: str, made: MakeMtp) -> None:
    checkpoint = made("mimo_v2", num_layers=2)
    off = serve(checkpoint.target, Setup())
    on = serve(
        checkpoint.target, Setup(k=3, debug=True), **checkpoint.options, draft_sampling=sampling
    )
    assert on == off


@pytest.mark.parametrize("graph", ["tape", "compiled", "eager"])
def test_coupled_drafts_of_perfect_layers_are_the_target_s_draws(
    graph: Any, perfect: MtpCheckpoint
) -> None:
    """Guards the place of each draft's noise, in the window and behind it."""
    setup = Setup(k=4, graph=graph)
    harness = Harness(setup.start(perfect.target, **perfect.options, draft_sampling="coupled"))
    for index, temperature in enumerate((0.0, 0.5, 1.0, 3.0)):
        harness.add(f"r{index}", [index + 1], params(30, index, temperature=temperature))
    harness.drain()
    check_all_accepted(harness, 60)
    harness.engine.close()


def test_rejection_leaves_greedy_requests_alone(made: MakeMtp) -> None:
    """Guards the distributions that come with drawn drafts: the verifier checks each of them."""
    checkpoint = made("mimo_v2", num_layers=2)
    off = serve(checkpoint.target, Setup())
    setup = Setup(k=3, verification="rejection", debug=True)
    options = checkpoint.options | {"draft_sampling": "probabilistic"}
    assert serve(checkpoint.target, setup, **options)[::2] == off[::2]


@pytest.mark.parametrize("family", [name for name in FORMS if name != "speculators"])
def test_a_target_serves_the_same_with_its_layers_and_without(
    family: str, made: MakeMtp, tmp_path: Path
) -> None:
    """Guards tensors that a target's loader refuses, or takes for its own."""
    checkpoint = made(family, num_layers=2)
    config = json.loads((checkpoint.target / "config.json").read_text())
    bare = {key: config[key] for key in config if not key.startswith(("num_nextn", "mtp_"))}
    names = load_file(make_checkpoint(tmp_path / "plain") / SINGLE_FILE)
    weights = load_file(checkpoint.target / SINGLE_FILE)
    write(tmp_path / "bare", bare, {name: weights[name] for name in names})
    assert len(weights) > len(names)
    off = serve(tmp_path / "bare", Setup())
    assert serve(checkpoint.target, Setup()) == off
    assert serve(checkpoint.target, Setup(k=2), **checkpoint.options) == off


def test_mimo_is_qwen2_with_layers(tmp_path: Path) -> None:
    """Guards the architecture's row: biases, and published code that only this row stands for."""
    qwen2 = make_checkpoint(tmp_path / "qwen2", "qwen2")
    config, weights = (
        json.loads((qwen2 / "config.json").read_text()),
        load_file(qwen2 / SINGLE_FILE),
    )
    auto_map = {"AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM"}
    published = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "auto_map": auto_map}
    mimo = tmp_path / "mimo"
    write(mimo, config | published | {"attention_bias": True}, weights)
    layers = make_mtp(tmp_path / "made", "mimo", arch="qwen2").layers
    checkpoint = add_layers(mimo, "mimo", layers)
    off = serve(qwen2, Setup())
    assert serve(mimo, Setup()) == off
    assert serve(mimo, Setup(k=3), **checkpoint.options) == off


def test_the_plan_counts_the_layers(made: MakeMtp) -> None:
    """Guards case 56: weights, KV, hidden states and buffers; layers that are never used cost
    nothing.
    """
    checkpoint = made("deepseek", num_layers=3, copies=True)
    plans = [
        plan_memory(Setup(k=k, num_blocks=20).start(checkpoint.target, **options).resolved)
        for k, options in ((0, {}), (1, checkpoint.options), (3, checkpoint.options))
    ]
    sizes = [sum(t.nbytes for t in layer.values()) for layer in checkpoint.layers]
    assert plans[1].weights - plans[0].weights == sizes[0]
    assert plans[2].weights - plans[0].weights == sum(sizes)
    assert plans[2].kv - plans[1].kv == plans[0].kv  # two more layers, as the target has
    assert plans[2].buffers > plans[1].buffers > plans[0].buffers


def test_right_layers_pass_the_check_at_load(perfect: MtpCheckpoint) -> None:
    engine = Setup(k=3).start(perfect.target, method="mtp", self_check="error")
    assert engine.start_times.seconds["self-check"] > 0
    engine.close()


def test_layers_that_were_read_the_wrong_way_are_found_out(tmp_path: Path) -> None:
    """Guards a family whose order of concatenation is not the checkpoint's."""
    wrong = make_perfect(tmp_path, 1, family="mimo")  # written for (embedding, hidden)
    with pytest.raises(ValueError, match="suspect the order of concatenation: read the other way"):
        start(wrong.target, self_check="error")


def start(target: Path, **fields: Any) -> Engine:
    return Setup(k=2).start(target, method="mtp", **fields)


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a weight fails the test."""

    def fail(*given: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(startup, "_load", fail)


@pytest.mark.usefixtures("no_weights")
def test_targets_without_layers_are_refused(tmp_path: Path) -> None:
    """Guards case 41: what is missing, and what would work."""
    target = make_checkpoint(tmp_path / "hf")
    with pytest.raises(ValueError, match=r"holds no layers for multi-token prediction; known are"):
        start(target)
    with pytest.raises(ValueError, match=r"read from safetensors alone; .*model=DIRECTORY"):
        start(make_gguf(target, tmp_path / "m.gguf"))
    with pytest.raises(ValueError, match=r"nowhere' is no directory"):
        start(target, model=str(tmp_path / "nowhere"))


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers=2, the weights have 1 such"),
        ({"model_type": "llama", "hidden_size": 32}, "hidden_size=32 .* the target's is 64"),
        ({"model_type": "llama", "intermediate_size": 80}, r"mlp.\w+.weight has shape .*\b80\b"),
        ({"model_type": "qwen2"}, "lacks 3 parameters: .*self_attn.k_proj.bias"),
        ({"model_type": "deepseek_v3"}, "model_type 'deepseek_v3' is not supported"),
        ({"model_type": "llama", "n_routed_experts": 4}, "n_routed_experts=4 is not implemented"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config=.*fp8"),
        ({"transformer_layer_config": 3}, "transformer_layer_config=3 is no object"),
    ],
)
def test_configs_that_do_not_fit_are_refused(
    changes: dict[str, Any], message: str, made: MakeMtp, tmp_path: Path
) -> None:
    checkpoint = made("deepseek", apart=True)
    assert checkpoint.model is not None
    config = json.loads((checkpoint.model / "config.json").read_text())
    write(tmp_path / "own", config | changes, load_file(checkpoint.model / SINGLE_FILE))
    with pytest.raises(ValueError, match=message):
        start(checkpoint.target, model=str(tmp_path / "own"))


@pytest.mark.usefixtures("no_weights")
def test_tensors_that_do_not_fit_are_refused(made: MakeMtp, tmp_path: Path) -> None:
    checkpoint = made("deepseek", apart=True)
    assert checkpoint.model is not None
    config = json.loads((checkpoint.model / "config.json").read_text())
    weights, own = load_file(checkpoint.model / SINGLE_FILE), tmp_path / "own"
    prefix = "model.layers.2."
    for changes, message in (
        (
            {f"{prefix}self_attn.q_proj.weight": torch.zeros(128, 64)},
            "has 128 rows, twice as many as there are queries",
        ),
        ({f"{prefix}hnorm.weight": None}, f"lacks 1 parameters: {prefix}hnorm.weight"),
        (
            {f"{prefix}surprise": weights[f"{prefix}hnorm.weight"]},
            f"no place for: {prefix}surprise",
        ),
        ({f"{prefix}eh_proj.weight": weights[f"{prefix}hnorm.weight"]}, r"has shape \[64\], .*128"),
    ):
        found = {k: v.clone() for k, v in (weights | changes).items() if v is not None}
        write(own, config, found)
        with pytest.raises(ValueError, match=message):
            start(checkpoint.target, model=str(own))


def test_heads_that_differ_are_refused(made: MakeMtp, tmp_path: Path) -> None:
    """Guards drafts by the wrong one of several output heads."""
    checkpoint = made("deepseek", apart=True, num_layers=2, copies=True)
    assert checkpoint.model is not None
    weights = load_file(checkpoint.model / SINGLE_FILE)
    weights["model.layers.3.shared_head.head.weight"] += 1
    config = json.loads((checkpoint.model / "config.json").read_text())
    write(tmp_path / "own", config, weights)
    with pytest.raises(ValueError, match=r"layers\.3\.shared_head\.head\.weight differs from"):
        start(checkpoint.target, model=str(tmp_path / "own"), self_check="off")


def test_histories_end_at_the_layers_own_limit(made: MakeMtp, tmp_path: Path) -> None:
    """Guards case 27: no row beyond what the layers were trained for."""
    checkpoint = made("deepseek", apart=True, num_layers=2)
    assert checkpoint.model is not None
    config = json.loads((checkpoint.model / "config.json").read_text())
    config |= {"model_type": "llama", "max_position_embeddings": 32}
    write(tmp_path / "own", config, load_file(checkpoint.model / SINGLE_FILE))
    options = {"model": str(tmp_path / "own"), "self_check": "off"}
    harness = Harness(start(checkpoint.target, **options))
    harness.add("a", [5, 6, 7], SamplingParams(max_tokens=50, ignore_eos=True))
    harness.drain()
    stats = harness.engine.stats()
    assert 0 < sum(n for key, n in stats.replays.items() if key.endswith("draft")) < stats.num_steps
    harness.engine.close()
