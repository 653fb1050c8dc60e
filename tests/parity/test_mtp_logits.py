"""Logits of every multi-token-prediction family against plain float64 torch, and against
transformers' own layers where it has them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.modeling_layers import MtpModel

from tests.graphengine.engine.setups import Setup
from tests.mtp_checkpoints import MtpCheckpoint, make_mtp
from tests.mtp_reference import Reference
from tests.parity.mtp_runs import PROMPT, MakeMtp, cached_maker, plain, record

pytestmark = pytest.mark.parity

CASES: dict[str, dict[str, Any]] = {
    "mimo": {"family": "mimo"},
    "mimo-biases": {"family": "mimo", "arch": "qwen2", "num_layers": 3},
    "mimo-apart": {"family": "mimo", "arch": "qwen2", "apart": True},
    "deepseek": {"family": "deepseek"},
    "deepseek-2-copies": {"family": "deepseek", "num_layers": 2, "copies": True},
    "deepseek-apart": {"family": "deepseek", "apart": True, "copies": True},
    "mimo_v2-3": {"family": "mimo_v2", "num_layers": 3},
    "mimo_v2-window": {"family": "mimo_v2", "arch": "mistral", "sliding_window": 6},
    "qwen3_next": {"family": "qwen3_next", "arch": "qwen3"},
    "qwen3_next-2": {"family": "qwen3_next", "arch": "qwen3", "num_layers": 2},
    "speculators": {"family": "speculators", "arch": "qwen3", "apart": True},
    "speculators-copies": {"family": "speculators", "apart": True, "copies": True},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MakeMtp:
    return cached_maker(tmp_path_factory.mktemp("mtp"), make_mtp)


def load_target(checkpoint: MtpCheckpoint) -> Any:
    """The target as transformers runs it, in float64."""
    transformers.utils.logging.set_verbosity_error()  # it reports the layers that it does not know
    return transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint.target, dtype=torch.float64, attn_implementation="eager"
    )


@torch.no_grad()
def states_of(model: Any, tokens: tuple[int, ...]) -> Tensor:
    """[T, hidden] behind the final norm."""
    found = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0]
    assert isinstance(found, Tensor)
    return found


def reference(checkpoint: MtpCheckpoint, model: Any) -> Reference:
    embedding, head = model.get_input_embeddings().weight, model.lm_head.weight
    return Reference(checkpoint, embedding.detach(), head.detach())


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_paper(name: str, made: MakeMtp) -> None:
    """Guards case 34 and 35: which layer, which token, which state, which norm, in which order."""
    checkpoint = made(**CASES[name])
    setup = Setup(k=5, graph="eager", max_num_seqs=1)
    truth = plain(checkpoint, [PROMPT], setup).streams
    recorder = record(checkpoint, setup, truth=truth, accept=(0, 2, 5, 1))
    [stream] = recorder.serve([PROMPT])
    recorder.harness.engine.close()
    model = load_target(checkpoint)
    states, expected = states_of(model, stream), reference(checkpoint, model)
    assert len(recorder.drafted) >= 4
    for one in recorder.drafted:
        tokens = list(one.history)
        wanted = expected.logits(tokens, states[: len(tokens) - 1], list(one.drafts))
        for found, right, draft in zip(one.logits, wanted, one.drafts, strict=True):
            torch.testing.assert_close(found.double(), right, rtol=0, atol=1e-4)
            assert draft == int(found.argmax())


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("family", ["deepseek", "mimo"])
def test_the_reference_is_what_transformers_computes(family: str, arch: str, made: MakeMtp) -> None:
    """Guards the reference itself: an implementation that is not ours, over whole sequences.

    Transformers has every layer's positions one further on, which rotation does not see, and no
    zero at position 0.
    """
    checkpoint = made(family, arch=arch, num_layers=2)
    model = load_target(checkpoint)
    model.config.get_mtp_config = lambda: model.config
    if family == "mimo":
        model.config.mtp_hidden_states_first = True
    theirs = MtpModel(model, 2).double().eval()
    names = {"embed_norm": "enorm", "hidden_norm": "hnorm", "projection": "eh_proj"}
    names = {plain: f"{name}.weight" for plain, name in (names | {"final": "post_norm"}).items()}
    for module, layer in zip(theirs.layers, checkpoint.layers, strict=True):
        renamed = {names.get(plain, f"mtp_block.{plain}"): t for plain, t in layer.items()}
        module.load_state_dict(renamed)
    ours = reference(checkpoint, model)
    ours.form = replace(ours.form, zero_first=False)
    tokens = list(range(40, 60))
    states = states_of(model, tuple(tokens))
    below, ours_below = states[None, :-3], states[:-3]
    for depth in range(2):
        ids = tokens[1 + depth : 1 + depth + 17]
        positions = torch.arange(17)[None] + 1 + depth
        with torch.no_grad():
            below = theirs.forward_layer(
                depth, below, positions, None, input_ids=torch.tensor([ids])
            )
        ours_below = ours.run(depth, ids, ours_below)
        torch.testing.assert_close(ours_below, below[0], rtol=0, atol=5e-5)  # norms in fp32
