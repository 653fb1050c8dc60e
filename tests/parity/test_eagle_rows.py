"""What EAGLE's rows are made of: token, position, hidden state, by hand (cases 34 and 35)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from graphengine.sampling.params import SamplingParams
from proposers.base import Draft, ProposeInputs
from proposers.eagle import EagleProposer
from tests.draft_heads import Head, make_eagle3
from tests.draft_reference import target_states
from tests.graphengine.engine.checkpoints import Checkpoints
from tests.graphengine.engine.harness import Harness
from tests.graphengine.engine.setups import Setup
from tests.tiny import make_checkpoint, make_model

pytestmark = pytest.mark.parity

K = 3
PROMPT = [10, 11, 12, 13, 14, 15, 16]  # L = 7
SETUP = Setup(k=K, graph="eager", numerics="fast", max_num_seqs=1)
Row = tuple[int, int, int]  # token, position, position whose hidden state is read


class Rows:
    """Writes down the live rows of every call of a proposer's forward, and fakes its drafts."""

    def __init__(self, harness: Harness, stream: list[int], num_right: int) -> None:
        proposer = harness.engine.proposer
        assert isinstance(proposer, EagleProposer)
        self.extended: list[list[Row]] = []
        self.stepped: list[list[Row]] = []
        self.chosen: list[int] = []
        self._harness, self._stream, self._num_right = harness, stream, num_right
        self._extend, self._step, self._propose = (
            proposer.extend,
            proposer.step,
            proposer.propose,
        )
        proposer.extend = self._spy_extend  # type: ignore[method-assign]
        proposer.step = self._spy_step  # type: ignore[method-assign]
        proposer.propose = self._spy_propose  # type: ignore[method-assign]

    def _spy_extend(self, views: Any, rows: Any, activations: Any) -> Any:
        names = ("token_ids", "positions", "slot_mapping")
        self._note(self.extended, *(views[name].tolist() for name in names))
        return self._extend(views, rows, activations)

    def _spy_step(self, views: Any, rows: Any, activations: Any, state: Any) -> None:
        self._note(
            self.stepped,
            rows.token_ids.tolist(),
            rows.positions.tolist(),
            rows.slot_mapping.tolist(),
        )
        self._step(views, rows, activations, state)

    def _note(self, calls: list[list[Row]], *columns: list[int]) -> None:
        """Live rows alone; a slot is told as the place in the request that it is of."""
        (request,) = self._harness.requests.values()
        size, table = self._harness.engine.kv.block_size, request.block_table.block_ids
        place = {
            block * size + i: n * size + i for n, block in enumerate(table) for i in range(size)
        }
        calls.append([(t, p, place[slot]) for t, p, slot in zip(*columns, strict=True) if slot])

    def _spy_propose(self, inputs: ProposeInputs) -> Draft:
        """Drafts of which the first `num_right` are the target's own."""
        draft = self._propose(inputs)
        self.chosen = draft.token_ids[0].tolist()
        length, count = len(inputs.token_ids[0]), int(draft.num_draft_tokens[0])
        right = self._stream[length : length + count]
        wrong = [(token + 1) % 256 for token in right]
        n = self._num_right
        return Draft(
            token_ids=np.array([right[:n] + wrong[n:]], dtype=np.int32),
            num_draft_tokens=draft.num_draft_tokens,
            draft_kv_lens=draft.draft_kv_lens,
        )


@pytest.fixture(scope="module")
def stream(checkpoints: Checkpoints) -> list[int]:
    """The prompt and what the target answers."""
    harness = Harness(Setup(max_num_seqs=1).start(checkpoints.get()))
    harness.add("a", PROMPT, SamplingParams(max_tokens=30, ignore_eos=True))
    harness.drain()
    harness.engine.close()
    return PROMPT + harness.stream("a")


@pytest.mark.parametrize("num_right", range(K + 1))
def test_tokens_positions_and_hidden_states(
    num_right: int, stream: list[int], checkpoints: Checkpoints
) -> None:
    """Guards case 34: row i is (token i + 1, position i, hidden state i), rebuilt when verified."""
    harness = Harness(
        SETUP.start(checkpoints.get(), method="eagle", model=str(checkpoints.get("eagle3")))
    )
    rows = Rows(harness, stream, num_right)
    harness.add("a", PROMPT, SamplingParams(max_tokens=20, ignore_eos=True))
    while not rows.stepped:
        harness.step()
    # The prompt: all but the row of its last token, which the target has not run yet.
    prefilled = [(11, 0, 0), (12, 1, 1), (13, 2, 2), (14, 3, 3), (15, 4, 4), (16, 5, 5)]
    first, window = rows.extended
    assert first == prefilled
    assert window == prefilled[-1:]  # again, for the state behind it
    # Each draft but the last goes on behind: positions 6 and 7, with the head's own states.
    drafts = rows.chosen
    assert rows.stepped == [[(drafts[0], 6, 6)], [(drafts[1], 7, 7)]]
    rows.extended, rows.stepped = [], []
    harness.step()
    # Accepted drafts and the token behind them, with the target's states at 6 and on.
    (window,) = rows.extended
    assert window == [(stream[i + 1], i, i) for i in range(6, 7 + num_right)]
    last = 7 + num_right
    assert [[position for _, position, _ in call] for call in rows.stepped] == [[last], [last + 1]]
    check_states(harness, stream)
    harness.engine.close()


def check_states(harness: Harness, stream: list[int]) -> None:
    """What is stored in the slots of a request is the target's hidden states there."""
    (request,) = harness.requests.values()
    states, size = harness.engine.runner.hidden_states, harness.engine.kv.block_size
    assert states is not None
    table = request.block_table.block_ids
    slots = [table[i // size] * size + i % size for i in range(request.kv_len)]
    wanted = target_states(make_model("llama"), stream[: request.kv_len], states.taps)
    torch.testing.assert_close(states.storage[slots], wanted, rtol=1e-4, atol=1e-4)


NUM_LAYERS = 4


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose layer i adds 2^i to a residual stream of 0: the state after t is 2^t - 1."""
    path = tmp_path_factory.mktemp("counting") / "target"
    make_checkpoint(path, num_hidden_layers=NUM_LAYERS, attention_bias=True)
    weights = load_file(path / "model.safetensors")
    for name, tensor in weights.items():
        if not name.endswith("norm.weight"):
            tensor.zero_()
    for index in range(NUM_LAYERS):
        weights[f"model.layers.{index}.self_attn.o_proj.bias"].fill_(2.0**index)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize(
    ("form", "ids", "wanted"),
    [
        ("vllm", [0, 2, 4], [0, 3, 15]),  # inputs of layers; 4 is what the last one gives
        ("vllm", [1, 3], [1, 7]),
        ("speculators", [1, 2, 4], [1, 3, 15]),
        ("nvidia", [1, 2, 3], [3, 7, 15]),  # outputs, since the first is 1
        ("nvidia", [2, 3, 4], [3, 7, 15]),  # inputs
    ],
)
def test_layer_ids_are_of_the_right_layer(
    form: Any, ids: list[int], wanted: list[int], counting: Path, tmp_path: Path
) -> None:
    """Guards case 35: the captured values reveal the layer, first and last included."""
    head = Head(aux=tuple(ids), form=form, norm_before_fc=form == "vllm")
    make_eagle3(tmp_path, head)
    harness = Harness(SETUP.start(counting, method="eagle", model=str(tmp_path)))
    harness.add("a", PROMPT, SamplingParams(max_tokens=5, ignore_eos=True))
    while harness.engine.scheduler.running or not harness.num_steps:
        harness.step()
        (request,) = harness.requests.values()
        if not request.kv_len:
            break
        states, size = harness.engine.runner.hidden_states, harness.engine.kv.block_size
        assert states is not None
        table = request.block_table.block_ids
        for i in range(request.kv_len):
            row = states.storage[table[i // size] * size + i % size].view(len(wanted), -1)
            assert row.unique(dim=1).flatten().tolist() == wanted
    assert harness.num_steps > 1, "prefill and decode"
    harness.engine.close()
