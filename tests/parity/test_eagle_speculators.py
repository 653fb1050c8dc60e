"""EAGLE-3 heads against the modules of `speculators`, where that package is installed.

An optional check by somebody else's code; what CI relies on is the reference in test_eagle.py. To
run it: `pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0`, and what these import.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.draft_heads import LAYER, Head, make_eagle3
from tests.draft_reference import target_states
from tests.parity.test_eagle import HEADS, run
from tests.parity.test_eagle import model as model  # the fixtures
from tests.parity.test_eagle import target as target
from tests.tiny import VOCAB_SIZE

speculators = pytest.importorskip(
    "speculators.models.eagle3", reason="speculators is not installed: see the docstring"
)
pytestmark = pytest.mark.parity

# What its module has: no bias of the projection, heads as wide as the target, a head of their own.
NAMES = [
    *("plain", "last-layer", "norm-before-residual", "norm-output", "norm-before-fc", "fc-norm"),
    *("one-tap", "five-taps", "small-vocabulary", "own-embedding", "two-layers", "qwen3-layer"),
    "attention-bias",
]


class Oracle:
    """The package's module with a head's weights, and the logits that it computes."""

    def __init__(self, head: Head, tensors: dict[str, torch.Tensor], target: Any) -> None:
        layer = LAYER | dict(head.layer)
        family = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}
        layers = family[layer["model_type"]](**layer)
        layers._attn_implementation = "eager"
        flags = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm")
        config = speculators.Eagle3SpeculatorConfig(
            transformer_layer_config=layers,
            draft_vocab_size=head.draft_vocab,
            eagle_aux_hidden_state_layer_ids=list(head.aux),
            **{name: value for name, value in asdict(head).items() if name in flags},
        )
        self._module = speculators.Eagle3DraftModel(config).eval()
        embedding = {"embed_tokens.weight": target.model.embed_tokens.weight.detach()}
        left_out = self._module.load_state_dict(embedding | tensors, strict=False)
        assert not left_out.unexpected_keys
        assert {name.split(".")[0] for name in left_out.missing_keys} <= {
            *("verifier_lm_head", "verifier_norm", "rotary_emb")
        }
        self._module.double()

    def logits(self, tokens: list[int], taps: torch.Tensor, drafts: list[int]) -> torch.Tensor:
        """[drafts, draft_vocab], of a chain behind `tokens`."""
        found: list[torch.Tensor] = []
        handle = self._module.lm_head.register_forward_hook(
            lambda module, given, output: found.append(output[0, len(tokens) - 2])
        )
        known = torch.tensor([tokens[1:] + drafts])
        unused = taps.new_zeros(len(drafts), taps.shape[1])  # of rows behind the one that is read
        with torch.no_grad():
            self._module(
                hidden_states=torch.cat([taps, unused])[None],
                input_ids=known,
                document_ids=torch.zeros_like(known),
                ttt_steps=len(drafts),
            )
        handle.remove()
        return torch.stack(found)


@pytest.mark.parametrize("name", NAMES)
def test_logits(name: str, target: Path, model: Any, tmp_path: Path) -> None:
    """Guards against a reference, and an engine, that have misread the same thing."""
    head = replace(HEADS[name], form="speculators")
    tensors = make_eagle3(tmp_path, head)
    oracle, num_drafts = Oracle(head, tensors, model), 0
    table = tensors.get("d2t", torch.zeros(VOCAB_SIZE, dtype=torch.long))
    for chain in run(target, tmp_path):
        states = target_states(model, chain.history[:-1], head.aux)
        wanted = oracle.logits(chain.history, states, chain.drafts)
        found = torch.stack(chain.logits)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)
        columns = wanted.argmax(-1)
        assert chain.drafts == (columns + table[columns]).tolist()
        num_drafts += len(chain.drafts)
    assert num_drafts > 20
