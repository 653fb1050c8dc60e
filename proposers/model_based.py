"""ModelBasedProposer: drafts by a model of its own; one graph for the whole k-step chain.

Owns the chain: which rows are run, with which tokens, positions and slots, and what comes back.
A step first *extends* the draft KV by the tokens that were verified since (a window of fixed
width), takes the state behind the last of them, and from there drafts token by token. What a window
cannot hold (a prompt, a gap after steps without drafts) is filled before, outside the table.
Subclasses hold the architecture's forward. Keeps nothing of a request: how much of its draft KV is
valid is the engine's to know, since the rows live and die with the target's.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from capture.manager import CaptureManager
from capture.shapes import ShapeKey
from proposers.base import NO_TOKEN, Draft, ProposeInputs, StatelessProposer, TokenArray
from proposers.chain import INPUTS, LOOP, TIER
from proposers.device import Activations, DraftRuntime, PrefillInputs, Rows
from proposers.requests import GREEDY, WORDS, write_requests
from proposers.window import HostViews, Layout, Window, write_loop, write_rows

Tensor = torch.Tensor
Views = Mapping[str, Tensor]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Cell:
    """What the host reads and writes of a cell."""

    host: HostViews  # inputs, those of the window in the window's shape
    rows: Rows  # of the window
    drafts: TokenArray  # [num_reqs, k + 1]
    probs: Tensor | None  # [num_reqs, k + 1, vocab]


class ModelBasedProposer(StatelessProposer, ABC):
    """See the module docstring.

    Args:
        runtime: of the engine.
        shift: 0: a slot's row embeds its own token; 1: the one behind it.
        lookahead: how many tokens behind its own a slot's row depends on; at least `shift`.
        max_len: longest history that the model drafts for; longer ones get no drafts.
        num_embeddings: ids from here on are embedded as the last id.
        rms_norm_eps: of the norms in `ops`.
        tokens: [draft_vocab] int32, the target's id of each column of the logits; None: the same.
    """

    name: str
    graph_safe = True
    needs_hidden_states = False
    produces_probs = True
    suspects = "the checkpoint, which may be of another target"

    def __init__(
        self,
        runtime: DraftRuntime,
        *,
        shift: int,
        lookahead: int,
        max_len: int,
        num_embeddings: int,
        rms_norm_eps: float,
        tokens: Tensor | None = None,
    ) -> None:
        self.runtime = runtime
        self.ops = runtime.ops(rms_norm_eps)
        self.shift = shift
        self.lookahead = lookahead
        self.max_len = min(max_len, runtime.max_model_len)
        self._layout = Layout(
            block_size=runtime.block_size,
            max_model_len=runtime.max_model_len,
            shift=shift,
            num_embeddings=num_embeddings,
        )
        self._tokens = tokens
        self._manager: CaptureManager | None = None
        self._cells: dict[tuple[int, int], _Cell] = {}
        if self.max_len < runtime.max_model_len:
            logger.warning(
                "proposer %s drafts for histories up to %d tokens, the limit of its checkpoint; "
                "max_model_len is %d",
                self.name,
                self.max_len,
                runtime.max_model_len,
            )

    def variants(self) -> Iterator[tuple[str, ModelBasedProposer]]:
        """Other readings of the checkpoint, for the check at load; see `ModelProposer`."""
        yield from ()

    # ---- the architecture ----

    @abstractmethod
    def extend(self, views: Views, rows: Rows, activations: Activations) -> Tensor:
        """Run rows whose tokens are known; returns the state [T, hidden] behind each. Captured."""

    @abstractmethod
    def step(self, views: Views, rows: Rows, activations: Activations, state: Tensor) -> None:
        """Run one drafted token a request on from `state` [R, hidden], and replace it. Captured."""

    @abstractmethod
    def logits(self, out: Tensor, state: Tensor, activations: Activations) -> None:
        """out [R, draft_vocab] from the states of the rows. Captured."""

    def width(self, k: int) -> int:
        """Rows a request of the window: what a step can have verified, all behind it once more."""
        return k + 1

    def num_kept_drafts(self, allowance: int, k: int) -> int:
        """How many of a request's drafts have KV that stays valid where they are accepted."""
        return 0

    def num_loop_rows(self, allowance: int, k: int) -> int:
        """Drafts of a request that are run on: for the next one's sake, or to keep their KV."""
        return max(allowance - 1, self.num_kept_drafts(allowance, k))

    def _loop_rows(self, counts: TokenArray, k: int) -> list[int]:
        """The same of each request; none where nothing is drafted."""
        return [self.num_loop_rows(count, k) if count else 0 for count in counts.tolist()]

    def deepen(self, depth: int, views: Views, rows: Rows, activations: Activations) -> Tensor:
        """Run deeper layers over rows that `extend` has run; returns their states. Captured.

        Args:
            depth: from 1 to lookahead - shift; the rows' tokens are so many further on.
        """
        raise AssertionError(f"proposer {self.name} has no layer {depth} behind its first")

    def advance(self, step: int, views: Views, window: Views) -> None:
        """From the draft of `step` to the state that the next one is chosen from. Captured."""
        num_reqs = len(views["block_table"])
        part = slice(step * num_reqs, (step + 1) * num_reqs)
        rows = self.runtime.rows(
            views["draft.chosen"],
            views["draft.loop_positions"][part],
            views["draft.loop_slots"][part],
            views["block_table"],
            views["draft.loop_start"],
        )
        activations = self.runtime.activations(views, num_reqs)
        self.step(views, rows, activations, views["draft.state"])

    # ---- capture ----

    def capture(self, manager: object) -> None:
        """Capture a chain for every cell of the table that has drafts."""
        assert isinstance(manager, CaptureManager), f"{manager!r} captures nothing"
        self._manager = manager
        for num_rows in (1, 2):  # torch compiles a piece for one row, and for any more
            views = self.runtime.buffers.prefill(num_reqs=1, num_tokens=num_rows)
            self.extend(views, self._window_rows(views), self._activations(views))
        manager.capture_tier(TIER, self._chain, self._prepare, num_rows=self._num_rows)

    def _num_rows(self, key: ShapeKey) -> int:
        """Rows that a chain runs, padding included."""
        k = key.query_len - 1
        return key.num_reqs * (self.width(k) + self.num_loop_rows(k, k))

    def _chain(self, views: Views) -> None:
        """The captured step: extend, then choose and advance k times.

        Deeper layers are run where fewer drafts are wanted, too: for their KV.
        """
        ops = self.ops
        num_reqs, k = len(views["block_table"]), _num_drafts(views)
        window = self._window_views(num_reqs, k)
        state, activations = views["draft.state"], self.runtime.activations(views, num_reqs)
        behind = self.extend(window, self._window_rows(window), self._activations(window))
        ops.take_rows(state, behind, views["draft.last_rows"])
        num_steps = max(k, self.lookahead - self.shift + 1)
        for step in range(num_steps):
            if step < k:
                self.logits(views["draft.logits"], state, activations)
                ops.choose(
                    views["draft.chosen"],
                    views["draft.drafts"],
                    views.get("draft.probs"),
                    views["draft.logits"],
                    self._tokens,
                    views["draft.requests"],
                    step,
                )
            if step + 1 < num_steps:
                self.advance(step, views, window)

    def _window_views(self, num_reqs: int, k: int) -> Views:
        num_tokens = num_reqs * self.width(k)
        return self.runtime.buffers.prefill(num_reqs=num_reqs, num_tokens=num_tokens)

    def _window_rows(self, views: Views, max_query_len: int | None = None) -> Rows:
        tokens, positions, slots, table, starts = (views[name] for name in INPUTS)
        return self.runtime.rows(tokens, positions, slots, table, starts, max_query_len)

    def _activations(self, views: Views) -> Activations:
        return self.runtime.activations(views, len(views["token_ids"]))

    # ---- steps ----

    def prefill(self, inputs: PrefillInputs) -> TokenArray:
        """Fill the draft KV of prompt rows, as far as the tokens are known.

        In all no more rows than the target has run and a forward's worth: what is missing further
        back is caught up step by step.
        """
        lengths = np.array([len(tokens) for tokens in inputs.token_ids], dtype=np.int32)
        known = np.where(lengths < self.max_len, lengths - self.lookahead, 0)
        ends = np.minimum(inputs.num_slots, known)
        window = Window(inputs.token_ids, inputs.block_table, inputs.draft_kv_lens, ends)
        return self._fill(window, inputs.num_new_rows + self.runtime.max_fill_rows)

    def propose(self, inputs: ProposeInputs) -> Draft:
        """Draft for every request that has room, in one replay."""
        assert self._manager is not None, f"proposer {self.name} has not been captured"
        cache = inputs.cache
        assert cache is not None, f"proposer {self.name} needs to know where its KV lies"
        k, num_reqs = inputs.k, inputs.num_reqs
        lengths = np.array([len(tokens) for tokens in inputs.token_ids], dtype=np.int32)
        ends = lengths - self.shift
        room = np.clip(self.max_len - lengths, 0, None)
        counts = np.where(ends > 0, np.minimum(inputs.num_draft_tokens, room), 0)
        starts = np.where(counts > 0, np.maximum(ends - self.width(k), 0), 0)
        gap = Window(inputs.token_ids, cache.block_table, cache.draft_kv_lens, starts)
        filled = self._fill(gap, self.runtime.max_fill_rows)
        counts = np.where(filled < starts, 0, counts)  # what is left of a gap is for the next step
        live = counts > 0
        if not live.any():
            return replace(Draft.empty(num_reqs, k), draft_kv_lens=filled)
        ends = np.where(live, ends, filled)
        key = self._manager.dispatch(num_reqs, k, TIER)
        assert key.query_len == k + 1, f"no cell of {k} drafts"
        # At least the last row is run, for the state behind it.
        starts = np.where(live, np.minimum(np.maximum(starts, filled), ends - 1), ends)
        window = Window(inputs.token_ids, cache.block_table, starts, ends)
        self._write(key, window, inputs, counts)
        num_tokens = int((ends - starts).sum()) + sum(self._loop_rows(counts, k))
        self._manager.replay(key, num_reqs=num_reqs, num_tokens=num_tokens)
        kept = [self.num_kept_drafts(int(count), k) for count in counts]
        cached = np.where(live, lengths - self.lookahead + kept, 0)
        return self._read(key, counts, np.maximum(cached, filled))

    def first_drafts(self, token_ids: TokenArray, block_table: TokenArray) -> TokenArray:
        """The likeliest first draft at every place of a text, teacher-forced."""
        found = np.full(len(token_ids), NO_TOKEN, dtype=np.int32)
        end = np.array([len(token_ids) - self.lookahead], dtype=np.int32)
        window = Window([token_ids], block_table[None], np.zeros_like(end), end)
        for start, views, states in self._run_window(window):
            ids = torch.cat([self._likeliest(views, part) for part in states.split(1)])
            # A row tells what follows the last token that it has seen.
            first = int(start[0]) + self.shift
            found[first : first + len(ids)] = ids.numpy()
        return found

    def _likeliest(self, views: Views, state: Tensor) -> Tensor:
        """The likeliest token [1] by a state [1, hidden]."""
        out = self.runtime.buffers.cell(ShapeKey(1, 2, TIER))["draft.logits"]
        self.logits(out, state, self.runtime.activations(views, 1))
        column = out.argmax(-1)
        return column if self._tokens is None else self._tokens[column]

    def _read(self, key: ShapeKey, counts: TokenArray, draft_kv_lens: npt.NDArray[Any]) -> Draft:
        num_reqs, k = len(counts), key.query_len - 1
        cell = self._cell(key.num_reqs, k)
        drafts = cell.drafts[:num_reqs, :k].copy()
        drafts[np.arange(k) >= counts[:, None]] = NO_TOKEN
        return Draft(
            token_ids=drafts,
            num_draft_tokens=counts.astype(np.int32),
            probs=None if cell.probs is None else cell.probs[:num_reqs, :k].clone(),
            draft_kv_lens=draft_kv_lens.astype(np.int32),
        )

    def _fill(self, window: Window, most_rows: int) -> TokenArray:
        """Run rows beside the table, for their KV; returns the slots of each that are valid now."""
        assert self._manager is not None, f"proposer {self.name} has not been captured"
        part = window.within(most_rows)
        for _ in self._run_window(part):
            self._manager.count_eager(f"fill:{self.name}")
        return np.maximum(part.ends, window.starts)

    def _run_window(self, window: Window) -> Iterator[tuple[TokenArray, Views, Tensor]]:
        """Run rows in forwards of a bounded size, in order; gives first slots, views and states."""
        most_reqs, starts = self.runtime.max_num_seqs, window.starts.copy()
        while (left := np.maximum(window.ends - starts, 0)).any():
            chosen = np.flatnonzero(left)[:most_reqs]
            room = self.runtime.max_fill_rows - np.concatenate(([0], np.cumsum(left[chosen])[:-1]))
            takes = np.minimum(left[chosen], np.maximum(room, 0))
            chosen, takes = chosen[takes > 0], takes[takes > 0]
            part = window.part(chosen, starts[chosen], starts[chosen] + takes)
            views = self.runtime.buffers.prefill(num_reqs=len(chosen), num_tokens=int(takes.sum()))
            host = {name: views[name].numpy() for name in INPUTS}
            offsets = np.concatenate(([0], np.cumsum(takes)))
            write_rows(host, part, offsets, self._layout)
            rows = self._window_rows(views, int(takes.max()))
            activations = self._activations(views)
            self.runtime.plan(rows)
            yield part.starts, views, self.extend(views, rows, activations)
            for depth in range(1, self.lookahead - self.shift + 1):
                write_rows(host, part, offsets, self._layout, depth)
                self.deepen(depth, views, rows, activations)
            starts[chosen] += takes

    # ---- inputs ----

    def _write(
        self, key: ShapeKey, window: Window, inputs: ProposeInputs, counts: TokenArray
    ) -> None:
        """Fill a cell's inputs, padding included."""
        k, num_reqs, width = inputs.k, inputs.num_reqs, self.width(inputs.k)
        cell = self._cell(key.num_reqs, k)
        views = cell.host
        for name in ("token_ids", "positions", "slot_mapping", "block_table"):
            views[name][...] = 0
        starts = np.arange(key.num_reqs + 1, dtype=np.int32) * width
        write_rows(views, window, starts, self._layout)
        views["query_start_loc"][:] = starts
        views["draft.last_rows"][:] = starts[:-1]
        live = np.maximum(window.ends - window.starts, 1) - 1
        views["draft.last_rows"][:num_reqs] += live
        sampling = inputs.sampling or [GREEDY] * num_reqs
        lengths = [len(tokens) for tokens in inputs.token_ids]
        write_requests(views["draft.requests"].reshape(key.num_reqs, WORDS), sampling, lengths)
        views["draft.loop_start"][:] = np.arange(key.num_reqs + 1)
        shape = (key.query_len, key.num_reqs)
        loop = {name: views[name].reshape(shape) for name in LOOP}
        write_loop(loop, window, self._loop_rows(counts, k), self._layout)
        self.runtime.plan(cell.rows)

    def _cell(self, num_reqs: int, k: int) -> _Cell:
        """Views of a cell, made once: a step is too short to make them again."""
        if (num_reqs, k) not in self._cells:
            views = dict(self.runtime.buffers.cell(ShapeKey(num_reqs, k + 1, TIER)))
            window = self._window_views(num_reqs, k)
            views |= {name: window[name] for name in INPUTS}
            specs = self.runtime.buffers.specs
            shape = (num_reqs, k + 1)
            probs = views.get("draft.probs")
            self._cells[num_reqs, k] = _Cell(
                host={name: views[name].numpy() for name in specs if specs[name].role == "input"},
                rows=self._window_rows(window),
                drafts=views["draft.drafts"].numpy().reshape(shape),
                probs=None if probs is None else probs.view(*shape, -1),
            )
        return self._cells[num_reqs, k]

    def _prepare(self, key: ShapeKey, variant: int) -> None:
        """Inputs of a plausible batch for capture: every row lives in the null block."""
        views = self._cell(key.num_reqs, key.query_len - 1).host
        width = self.width(key.query_len - 1)
        for name, spec in self.runtime.buffers.specs.items():
            if spec.role == "input" and (name in INPUTS or name.startswith("draft.")):
                views[name][...] = spec.fill
        views["token_ids"][:] = variant
        views["query_start_loc"][:] = np.arange(key.num_reqs + 1) * width
        views["draft.last_rows"][:] = np.arange(key.num_reqs) * width + variant
        views["draft.loop_start"][:] = np.arange(key.num_reqs + 1)
        positions = np.arange(width) + variant
        views["positions"].reshape(-1, width)[:] = positions % self.runtime.max_model_len


def _num_drafts(views: Views) -> int:
    """k of a cell's views."""
    return len(views["token_ids"]) // len(views["block_table"]) - 1
