"""EAGLE heads against a reference of their own: the logits of every draft, each flag by itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from graphengine.engine import Engine
from graphengine.sampling.params import SamplingParams
from proposers.base import Draft, ProposeInputs
from proposers.eagle import EagleProposer
from tests.draft_heads import LAYER, Head, make_eagle1, make_eagle3
from tests.draft_reference import ReferenceHead, target_states
from tests.graphengine.engine.setups import Setup
from tests.tiny import make_checkpoint, make_model

pytestmark = pytest.mark.parity

NUM_LAYERS = 8
PROMPT = [5, 6, 7, 200, 3, 9, 41, 77, 8, 150, 2]
SETUP = Setup(k=4, graph="eager", numerics="fast", max_num_seqs=2)

QWEN3 = (("model_type", "qwen3"),)
WIDE = (("hidden_size", 48), ("head_dim", 8))
HEADS: dict[str, Head] = {
    "plain": Head(),
    "eagle-form": Head(form="eagle", aux=(2, 4, 5)),
    "last-layer": Head(aux=(0, 3, 8)),
    "nvidia-form": Head(form="nvidia", aux=(3, 5, 8), norm_before_fc=True),
    "speculators-form": Head(form="speculators", norm_before_residual=True),
    "norm-before-residual": Head(norm_before_residual=True),
    "norm-output": Head(norm_output=True),
    "norm-before-fc": Head(norm_before_fc=True),
    "fc-norm": Head(fc_norm=True),
    "all-flags": Head(fc_norm=True, norm_output=True, norm_before_residual=True, fc_bias=True),
    "fc-bias": Head(fc_bias=True),
    "one-tap": Head(aux=(4,)),
    "five-taps": Head(aux=(1, 2, 4, 6, 7), fc_norm=True),
    "no-fc": Head(form="nvidia", has_fc=False, aux=(7,)),
    "small-vocabulary": Head(draft_vocab=100),
    "own-embedding": Head(own_embedding=True),
    "target's-head": Head(own_head=False),
    "other-width": Head(layer=WIDE, own_embedding=True),
    "two-layers": Head(layer=(("num_hidden_layers", 2),), norm_output=True),
    "qwen3-layer": Head(layer=QWEN3, form="speculators"),
    "attention-bias": Head(layer=(("attention_bias", True),)),
}
EAGLE1: dict[str, dict[str, Any]] = {
    "plain": {},
    "no-bias": {"bias": False},
    "target's-embedding": {"own_embedding": False},
    "qkv-bias": {"qkv_bias": True},
    "two-layers": {"num_hidden_layers": 2},
}


@dataclass
class Chain:
    """One request's drafts and the logits that they were chosen from."""

    history: list[int]
    drafts: list[int]
    logits: list[torch.Tensor] = field(default_factory=list)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("eagle") / "target"
    return make_checkpoint(path, num_hidden_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("llama", num_hidden_layers=NUM_LAYERS).double()


def record(engine: Engine) -> list[Chain]:
    """Have every chain of the first request written down. For an engine of eager graphs."""
    proposer = engine.proposer
    assert isinstance(proposer, EagleProposer)
    chains: list[Chain] = []
    logits: list[torch.Tensor] = []
    compute, propose = proposer.logits, proposer.propose

    def spy_logits(out: torch.Tensor, *given: Any) -> None:
        compute(out, *given)
        logits.append(out[0].clone())

    def spy_propose(inputs: ProposeInputs) -> Draft:
        logits.clear()
        draft = propose(inputs)
        count = int(draft.num_draft_tokens[0])
        drafts = draft.token_ids[0, :count].tolist()
        chains.append(Chain(inputs.token_ids[0].tolist(), drafts, logits[:count]))
        return draft

    proposer.logits = spy_logits  # type: ignore[method-assign]
    proposer.propose = spy_propose  # type: ignore[method-assign]
    return chains


def run(target: Path, head: Path, setup: Setup = SETUP, **options: Any) -> list[Chain]:
    engine = setup.start(target, method="eagle", model=str(head), **options)
    chains = record(engine)
    engine.add_request("a", PROMPT, SamplingParams(max_tokens=12, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    engine.close()
    return chains


def check(
    chains: list[Chain], reference: ReferenceHead, model: Any, taps: list[Any], tolerance: float
) -> None:
    """Logits as the reference's, and drafts that are its largest, as ids of the target."""
    assert sum(len(chain.drafts) for chain in chains) > 20
    table = reference.tensors.get("d2t")
    for chain in chains:
        states = target_states(model, chain.history[:-1], taps)
        expected = reference.logits(chain.history, states, chain.drafts)
        for draft, found, wanted in zip(chain.drafts, chain.logits, expected, strict=True):
            torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)
            column = int(found.argmax())
            assert draft == (column if table is None else column + int(table[column]))


def reference_of(config: dict[str, Any], tensors: dict[str, Any], model: Any) -> ReferenceHead:
    return ReferenceHead(
        config=config,
        tensors=tensors,
        embedding=model.model.embed_tokens.weight.detach(),
        head=model.lm_head.weight.detach(),
    )


@pytest.mark.parametrize("name", HEADS)
def test_eagle3(name: str, target: Path, model: Any, tmp_path: Path) -> None:
    """Guards each flag, form and size: one that is not obeyed moves every logit."""
    head = HEADS[name]
    tensors = make_eagle3(tmp_path, head)
    config = {**LAYER, **dict(head.layer), **asdict(head)}
    taps: list[Any] = list(head.aux) if head.has_fc else ["final"]
    check(run(target, tmp_path), reference_of(config, tensors, model), model, taps, 1e-4)


@pytest.mark.parametrize("name", EAGLE1)
def test_eagle1(name: str, target: Path, model: Any, tmp_path: Path) -> None:
    """Guards concat order, the missing norms and the borrowed head."""
    tensors = make_eagle1(tmp_path, **EAGLE1[name])
    config = {**LAYER, **EAGLE1[name]}
    check(run(target, tmp_path), reference_of(config, tensors, model), model, ["final"], 1e-4)


@pytest.mark.parametrize("name", ["plain", "all-flags"])
def test_bfloat16(name: str, target: Path, model: Any, tmp_path: Path) -> None:
    """Guards a matrix that is loaded elsewhere in the other dtype; bf16 rounds the weights."""
    head = HEADS[name]
    tensors = make_eagle3(tmp_path, head)
    rounded = make_model("llama", num_hidden_layers=NUM_LAYERS)
    for parameter in (*rounded.parameters(), *tensors.values()):
        if parameter.dim() == 2:
            parameter.data = parameter.data.bfloat16().float()
    config = {**LAYER, **asdict(head)}
    reference = reference_of(config, tensors, rounded)
    chains = run(target, tmp_path, Setup(k=4, graph="eager", numerics="fast", dtype="bfloat16"))
    check(chains, reference, rounded.double(), list(head.aux), 0.25)  # rows may be rounded, too
