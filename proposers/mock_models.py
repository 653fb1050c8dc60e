"""Scripted stand-ins for the proposers that carry a model: tests need no draft checkpoint.

Each has the contract of its original: flags, draft KV, hidden states, one graph for the chain, and
what it says of its rows. What it drafts is a recording's. All weights are zero, so that nothing
comes through the chain but NaN, and shows; `mock_mirror` checks what the engine promises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from proposers.base import NO_TOKEN, Commit, Draft, ProposeInputs, TokenArray
from proposers.device import Activations, Architecture, DraftRuntime, PrefillInputs, Rows, Tap
from proposers.mock import MockProposer
from proposers.mock_mirror import DraftMirror
from proposers.model_based import ModelBasedProposer, Views
from proposers.override import with_points

Tensor = torch.Tensor

UNTOUCHED: Final = 1  # what a chain drafts where all that it has read was a number
_CERTAIN: Final = 1e6  # its logit, which no noise and no temperature reaches


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What a stand-in asks of the engine."""

    architecture: Architecture  # the target's, whose layers do for the draft's
    num_layers: int
    shift: int
    lookahead: int
    taps: tuple[Tap, ...] = ()


class MockModelProposer(ModelBasedProposer):
    """See the module docstring.

    Args:
        runtime: of the engine.
        shape: what it has asked for.
        script: what it drafts.
    """

    suspects = "the recording"

    def __init__(self, runtime: DraftRuntime, shape: Shape, script: MockProposer) -> None:
        architecture = shape.architecture
        super().__init__(
            runtime,
            shift=shape.shift,
            lookahead=shape.lookahead,
            max_len=runtime.max_model_len,
            num_embeddings=runtime.vocab_size,
            rms_norm_eps=architecture.rms_norm_eps,
        )
        self.script = script
        self._blocks = [runtime.block(architecture, cache) for cache in runtime.kv_caches]
        for block in self._blocks:
            for weight in block.destinations().values():
                weight.zero_()
        hidden, vocab_size = architecture.hidden_size, runtime.vocab_size
        num_states = len(shape.taps) * hidden
        dtype, device = runtime.dtype, runtime.device
        self._projection = torch.zeros(hidden, num_states, dtype=dtype, device=device)
        self._head = torch.zeros(vocab_size, hidden, dtype=runtime.dtype, device=runtime.device)
        self._bias = torch.zeros(vocab_size, device=runtime.device)
        self._bias[UNTOUCHED] = _CERTAIN
        self._mirror = DraftMirror(
            self.name, runtime, self.ops, lookahead=shape.lookahead, num_states=num_states
        )

    def extend(self, views: Views, rows: Rows, activations: Activations) -> Tensor:
        hidden: Tensor = activations.hidden
        self.ops.embed(hidden, self.runtime.target_embedding, views["token_ids"])
        if self.needs_hidden_states:
            self.ops.load_slots(views["draft.taps"], views["slot_mapping"])
            self.ops.linear(hidden, views["draft.taps"], self._projection, add=True)
        self._forward(rows, activations)
        return hidden

    def step(self, views: Views, rows: Rows, activations: Activations, state: Tensor) -> None:
        self._forward(rows, activations.with_hidden(state))

    def logits(self, out: Tensor, state: Tensor, activations: Activations) -> None:
        self.ops.linear(out, state, self._head, self._bias)

    def _forward(self, rows: Rows, activations: Activations) -> None:
        for block in self._blocks:
            self.ops.rms_norm(activations.normed, activations.hidden, block.input_norm)
            block.attend(activations.normed, rows, activations)
            block.feed_forward(activations)

    def prefill(self, inputs: PrefillInputs) -> TokenArray:
        """Fill rows, after a look at what is there."""
        for row, tokens in enumerate(inputs.token_ids):
            cached, present = int(inputs.draft_kv_lens[row]), int(inputs.num_slots[row])
            table = inputs.block_table[row]
            self._mirror.check(tokens, table, cached=cached, present=present, reserved=present)
        ends = super().prefill(inputs)
        for row, tokens in enumerate(inputs.token_ids):
            made = range(int(inputs.draft_kv_lens[row]), int(ends[row]))
            self._mirror.remember(tokens.tolist(), inputs.block_table[row], made)
        return ends

    def propose(self, inputs: ProposeInputs) -> Draft:
        """Replay the chain, and draft the script's tokens instead of its."""
        cache = inputs.cache
        assert cache is not None, f"proposer {self.name} needs to know where its KV lies"
        lengths = [len(tokens) for tokens in inputs.token_ids]
        reserved = [n + int(most) for n, most in zip(lengths, inputs.num_draft_tokens, strict=True)]
        for row, tokens in enumerate(inputs.token_ids):
            self._mirror.check(
                tokens,
                cache.block_table[row],
                cached=int(cache.draft_kv_lens[row]),
                present=lengths[row] - 1,
                reserved=reserved[row],
            )
        self._mirror.check_owned(cache.block_table, lengths, reserved)
        chain = super().propose(inputs)
        self._check_numbers(chain.token_ids)
        draft = self._scripted(chain, self.script.propose(inputs), lengths)
        if draft.draft_kv_lens is not None:
            for row, tokens in enumerate(inputs.token_ids):
                known = [*tokens.tolist(), *draft.token_ids[row].tolist()]
                said, table = int(draft.draft_kv_lens[row]), cache.block_table[row]
                self._mirror.remember(known, table, range(int(cache.draft_kv_lens[row]), said))
                self._mirror.forget(table, range(said, reserved[row]))
        return draft

    def first_drafts(self, token_ids: TokenArray, block_table: TokenArray) -> TokenArray:
        """Nothing, after a look at the text's rows: nobody has recorded what follows."""
        self._check_numbers(super().first_drafts(token_ids, block_table))
        return np.full(len(token_ids), NO_TOKEN, dtype=np.int32)

    def on_commit(self, commit: Commit) -> None:
        """Tell the script."""
        self.script.on_commit(commit)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Tell the script. Rows are the engine's to forget."""
        self.script.forget(request_ids)

    def _check_numbers(self, chosen: TokenArray) -> None:
        """Every draft of a chain whose rows were all numbers is the same token."""
        assert np.isin(chosen, (NO_TOKEN, UNTOUCHED)).all(), (
            f"{self.name}: a row has read what is no number: draft KV or a hidden state is missing"
        )

    def _scripted(self, chain: Draft, script: Draft, lengths: Sequence[int]) -> Draft:
        """A chain's draft with the script's tokens, of which there may be fewer."""
        counts = np.minimum(chain.num_draft_tokens, script.num_draft_tokens)
        live = np.arange(chain.token_ids.shape[1]) < counts[:, None]
        token_ids = np.where(live, script.token_ids, NO_TOKEN).astype(np.int32)
        cached = chain.draft_kv_lens
        if cached is not None:
            cached = np.minimum(cached, np.array(lengths) + counts).astype(np.int32)
        return replace(
            chain,
            token_ids=token_ids,
            num_draft_tokens=counts,
            probs=with_points(chain.probs, token_ids, counts > 0),
            draft_kv_lens=cached,
        )


class MockDraftModel(MockModelProposer):
    """In the place of `draft_model`."""

    name = "mock-draft-model"

    def width(self, k: int) -> int:
        return 2

    def num_kept_drafts(self, allowance: int, k: int) -> int:
        return min(allowance, k - 1)


class MockEagle(MockModelProposer):
    """In the place of `eagle`: three hidden states, one layer."""

    name = "mock-eagle"
    needs_hidden_states = True


class MockMtp(MockModelProposer):
    """In the place of `mtp`: the last hidden state, a layer a head."""

    name = "mock-mtp"
    needs_hidden_states = True

    def width(self, k: int) -> int:
        return k + self.lookahead

    def num_loop_rows(self, allowance: int, k: int) -> int:
        return max(allowance - self.lookahead, 0)

    def advance(self, step: int, views: Views, window: Views) -> None:
        """Nothing until the heads are used up: `extend` has run all of them."""
        if step + 1 >= self.lookahead:
            super().advance(step + 1 - self.lookahead, views, window)

    def deepen(self, depth: int, views: Views, rows: Rows, activations: Activations) -> Tensor:
        """Nothing, as there."""
        hidden: Tensor = activations.hidden
        return hidden
